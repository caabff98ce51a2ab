"""CUDA C++ kernels: NAME.cu is the kernel, NAME.py plans its launch; jit.py compiles, launch.py launches."""
