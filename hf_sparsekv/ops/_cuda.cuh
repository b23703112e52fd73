// What kernels in CUDA C++ share, and all of them that is not C++: _cuda.py puts it before each source.
// tests/ops/cuda_on_cpu.h has the same for a CPU.

#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]  // also as float4

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Dependent launches (_overlap.py): before anything is read or written; and where the next kernel may come. Before
// compute 9.0 there are none: a kernel begins when those before it have ended.
__device__ __forceinline__ void wait_for_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The same pointer, hidden from the compiler's view of its origin, so that it is kept in a register and not recomputed.
template <class T>
__device__ __forceinline__ T* keep(T* pointer) {
    asm("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// A number that all lanes have: branches on it then need no meeting.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Of the numbers of a warp's lanes up to this one.
__device__ __forceinline__ u32 sum_to_here(u32 value) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
        asm volatile(
            "{.reg .u32 other; .reg .pred there; shfl.sync.up.b32 other|there, %0, %1, 0, 0xffffffff;"
            "@there add.u32 %0, %0, other;}"
            : "+r"(value)
            : "r"(d));
    return value;
}

// ---- clusters

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// Where nothing that was written is to be seen: without the fence, which waits for the whole GPU's memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// All threads of all blocks are here, and what they wrote is seen by all.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Where a block's own shared memory has its counterpart in block `rank`.
__device__ __forceinline__ u32 there(const void* mine, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank));
    return address;
}

__device__ __forceinline__ u32 load_there(const u32* mine, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there(mine, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void store_there(u32* mine, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there(mine, rank)), "r"(value) : "memory");
}

__device__ __forceinline__ void store_there(float* mine, u32 rank, float value) {
    store_there((u32*)mine, rank, __float_as_uint(value));
}

// Asynchronous stores to another block's shared memory: a block's mbarrier counts the bytes that it expects, so no block
// needs a barrier of the cluster, or its fence. See "st.async" and "mbarrier" of PTX.
// By one thread, before it arrives at the barrier of the cluster that all wait for before they store.
__device__ __forceinline__ void mbarrier_init(u64* mbarrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(mbarrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread, once, even if some have come already: that so many are all.
__device__ __forceinline__ void mbarrier_expect(u64* mbarrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(mbarrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void store_async(u32* mine, u32 rank, u32 value, u64* mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there(mine, rank)),
                 "r"(value), "r"(there(mbarrier, rank))
                 : "memory");
}

__device__ __forceinline__ void store_async(float* mine, u32 rank, float value, u64* mbarrier) {
    store_async((u32*)mine, rank, __float_as_uint(value), mbarrier);
}

__device__ __forceinline__ void store_async(float4* mine, u32 rank, const float4& value, u64* mbarrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            there(mine, rank)),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(there(mbarrier, rank))
        : "memory");
}

// All that is expected is there.
__device__ __forceinline__ void mbarrier_wait(u64* mbarrier) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again;}" ::"r"(
            (u32)__cvta_generic_to_shared(mbarrier))
        : "memory");
}

#endif

// ---- memory

// Load constant data that this kernel reads once, bypassing L1, which other data needs. The loads stay in the order and
// at the place of these calls, which may be before wait_for_kernels.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 all;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
                 : "l"(from));
    return all;
}

__device__ __forceinline__ uint2 load_once(const uint2* from) {
    uint2 both;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(both.x), "=r"(both.y) : "l"(from));
    return both;
}

// Likewise, but neighbours are read by other warps.
__device__ __forceinline__ float load_constant(const float* from) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

// 16 bytes of global memory if `there`, or zeros.
__device__ __forceinline__ uint4 load_16(const void* from, bool there) {
    uint4 all;
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(all.x), "=&r"(all.y), "=&r"(all.z), "=&r"(all.w)
        : "l"(from), "r"((u32)there)
        : "memory");
    return all;
}

// Likewise of 8 and of 4 bytes.
__device__ __forceinline__ uint2 load_8(const void* from, bool there) {
    uint2 both;
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; @p ld.global.v2.u32 {%0, %1}, [%2];}"
        : "=&r"(both.x), "=&r"(both.y)
        : "l"(from), "r"((u32)there)
        : "memory");
    return both;
}

__device__ __forceinline__ u32 load_4(const void* from, bool there) {
    u32 one;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u32 %0, [%1];}"
                 : "=&r"(one)
                 : "l"(from), "r"((u32)there)
                 : "memory");
    return one;
}

// ---- copies to shared memory, in the background

// Of 16 bytes, aligned to as many.
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
    const u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

// The thread's copies since the last call are a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The thread's groups are there, but for the `left` latest ones.
template <int left>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// ---- numbers

// 2 ** x; what is below the least normal number is 0.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float from_half(u32 bits) {
    float value;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits & 0xffff));
    return value;
}

// c += a b, of 16 x 32 and 32 x 8 numbers of 8 bits: what each thread of a warp has of them, see "mma.m16n8k32" of PTX.
__device__ __forceinline__ void multiply(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two numbers of 16 bits in a register.
__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 pack_bfloat16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// `bits & mask ^ other`, as one instruction: the compiler makes two where both are constants.
__device__ __forceinline__ u32 mask_xor(u32 bits, u32 mask, u32 other) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(bits), "r"(mask), "r"(other));
    return result;
}

// Of two numbers of 16 bits in a register each, the differences. Of bfloat16 from compute 9.0 on.
__device__ __forceinline__ u32 subtract_half(u32 these, u32 those) {
    u32 both;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(these), "r"(those));
    return both;
}

__device__ __forceinline__ u32 subtract_bfloat16(u32 these, u32 those) {
    u32 both;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(these), "r"(those));
    return both;
}

// Of 8 x 8 numbers of 16 bits, a thread has two neighbours in row `lane / 4`; it gets those of the transposed matrix.
__device__ __forceinline__ u32 transpose(u32 mine) {
    u32 its;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(its) : "r"(mine));
    return its;
}

// c += a b, of 16 x 16 and 16 x 8 numbers of 16 bits: see "mma.m16n8k16" of PTX.
#define MULTIPLY_16(name, kind)                                                                                \
    __device__ __forceinline__ void name(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {                \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                      \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
    }
MULTIPLY_16(multiply_half, "f16")
MULTIPLY_16(multiply_bfloat16, "bf16")
