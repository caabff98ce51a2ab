// What merging the partials of 16 CTAs costs at the end of a launch: through global memory and a counter, or through
// distributed shared memory within a cluster. 128 CTAs x 256 threads; each has ROWS x 128 floats and ROWS weights.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef MODE
#define MODE 0   // 0 nothing merged, each CTA writes its rows; 1 global counter; 2 DSMEM to the leader; 3 DSMEM, each merges its slice
#endif
#define SHARES 16
#define ROWS 4
#define DIM 128
extern __shared__ float4 raw[];
__device__ __forceinline__ unsigned cluster_rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ unsigned mapa(unsigned a, unsigned rank) { unsigned r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
__device__ __forceinline__ void st_cluster(unsigned a, float4 v) { asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" :: "r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory"); }
__device__ __forceinline__ float4 ld_cluster(unsigned a) { float4 v; asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a)); return v; }
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(256, 1) probe(const float* in, float* out, float4* partials, unsigned* counters, int chain) {
    unsigned share = blockIdx.x % SHARES, head = blockIdx.x / SHARES;
    float* mine = (float*)raw;                       // ROWS x DIM
    // a chain of dependent loads stands for what comes before: block id, keys
    const float* p = in + (blockIdx.x * 4096 + threadIdx.x * 4);
    float4 v = make_float4(0, 0, 0, 0);
    for (int i = 0; i < chain; ++i) { float4 w = __ldg((const float4*)(p + (int)v.x)); v.x += w.x; v.y += w.y; v.z += w.z; v.w += w.w; }
    if (threadIdx.x < ROWS * DIM / 4) ((float4*)mine)[threadIdx.x] = v;
    __syncthreads();
#if MODE == 0
    if (threadIdx.x < ROWS * DIM / 4) ((float4*)out)[blockIdx.x * ROWS * DIM / 4 + threadIdx.x] = ((float4*)mine)[threadIdx.x];
#elif MODE == 1
    __shared__ unsigned last;
    if (threadIdx.x < ROWS * DIM / 4) partials[blockIdx.x * (ROWS * DIM / 4) + threadIdx.x] = ((float4*)mine)[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned seen; asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(seen) : "l"(counters + head), "r"(SHARES - 1) : "memory");
        last = seen == SHARES - 1;
    }
    __syncthreads();
    if (last && threadIdx.x < ROWS * DIM / 4) {
        float4 s = make_float4(0, 0, 0, 0); float4 q[SHARES];
        #pragma unroll
        for (int i = 0; i < SHARES; ++i) q[i] = __ldcg(partials + (head * SHARES + i) * (ROWS * DIM / 4) + threadIdx.x);
        #pragma unroll
        for (int i = 0; i < SHARES; ++i) { s.x += q[i].x; s.y += q[i].y; s.z += q[i].z; s.w += q[i].w; }
        ((float4*)out)[head * ROWS * DIM / 4 + threadIdx.x] = s;
    }
#elif MODE == 2
    // each puts its rows where the leader has a place for them
    unsigned rank = cluster_rank();
    unsigned base = (unsigned)__cvta_generic_to_shared(raw) + 4096;
    cluster_arrive(); cluster_wait();   // all are there; before the keys come, in a kernel
    if (threadIdx.x < ROWS * DIM / 4) st_cluster(mapa(base + (rank * (ROWS * DIM / 4) + threadIdx.x) * 16, 0), ((float4*)mine)[threadIdx.x]);
    cluster_arrive();
    if (rank == 0) {
        cluster_wait();
        if (threadIdx.x < ROWS * DIM / 4) {
            float4 s = make_float4(0, 0, 0, 0);
            #pragma unroll
            for (int i = 0; i < CLUSTER; ++i) { float4 q = raw[256 + i * (ROWS * DIM / 4) + threadIdx.x]; s.x += q.x; s.y += q.y; s.z += q.z; s.w += q.w; }
            ((float4*)out)[(blockIdx.x / CLUSTER) * ROWS * DIM / 4 + threadIdx.x] = s;
        }
    } else cluster_wait();
#elif MODE == 3
    // each sums a slice of all
    unsigned rank = cluster_rank();
    unsigned base = (unsigned)__cvta_generic_to_shared(raw);
    cluster_arrive(); cluster_wait();
    const int per = ROWS * DIM / 4 / CLUSTER;   // float4s of a slice
    if (threadIdx.x < per * CLUSTER) {          // thread: source CTA = threadIdx / per, word = threadIdx % per
        float4 q = ld_cluster(mapa(base + (rank * per + threadIdx.x % per) * 16, threadIdx.x / per));
        raw[512 + threadIdx.x] = q;
    }
    __syncthreads();
    if (threadIdx.x < per) {
        float4 s = make_float4(0, 0, 0, 0);
        for (int i = 0; i < CLUSTER; ++i) { float4 q = raw[512 + i * per + threadIdx.x]; s.x += q.x; s.y += q.y; s.z += q.z; s.w += q.w; }
        ((float4*)out)[(blockIdx.x / CLUSTER) * ROWS * DIM / 4 + rank * per + threadIdx.x] = s;
    }
    cluster_arrive(); cluster_wait();           // nobody leaves while it is read
#endif
}
