// The Hopper kernels on the emulator, as a library.
#include "emulator.h"
#include "kernels.h"

const KernelSet& kernels = kHopper;
#include "../emulated_library.h"
