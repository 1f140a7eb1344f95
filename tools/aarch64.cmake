# Toolchain to cross-compile the kernels and their C++ test for 64-bit ARM.
# Links statically, so that qemu-aarch64 can run the test without ARM libraries.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
