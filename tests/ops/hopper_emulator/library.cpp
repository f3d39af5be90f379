// The Hopper kernels on the emulator, as a library.
#include "emulator.h"
#include "kernels.h"

namespace kernels = hopper;
#include "../emulated_library.h"
