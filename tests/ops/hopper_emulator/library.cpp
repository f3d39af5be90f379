// The Hopper kernels on the emulator, as a library.
#include "emulator.h"
#include "kernels.h"

const KernelSet kernels = hopper_kernels();
#include "../emulated_library.h"
