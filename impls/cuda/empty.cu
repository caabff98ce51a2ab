// empty.cu -- nothing: what a launch takes at least.

extern "C" __global__ void empty() {}
