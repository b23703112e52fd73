// CUDA C++ on a CPU, slowly: what _cuda.cuh has, and what CUDA itself has, for the kernels of this package. It comes after
// cuda_on_cpu_system.h.
//
// A block is a thread of the system, and its threads are fibers that take turns, in an order of chance, wherever they
// meet others: a barrier too few shows as a wrong result. Shared memory is the system thread's own; a block finds
// another's by the distance from a variable that both have.

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __cluster_dims__(...)
#define __shared__ static thread_local
#define DYNAMIC_SHARED(name) float* name = (float*)block->dynamic.data()
#ifndef CLUSTER
#define CLUSTER 1
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct float4 {
    float x, y, z, w;
};
struct uint4 {
    u32 x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct Index {
    u32 x, y;
};

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float __int_as_float(u32 bits) { return __uint_as_float(bits); }
inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline u32 __byte_perm(u32 low, u32 high, u32 which) {
    const u64 both = (u64)high << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
template <class A, class B>
inline auto min(A a, B b) {
    return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? std::common_type_t<A, B>(a) : b;
}
template <class A, class B>
inline auto max(A a, B b) {
    return std::common_type_t<A, B>(a) > std::common_type_t<A, B>(b) ? std::common_type_t<A, B>(a) : b;
}

#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// ---- blocks and fibers

struct Barrier {
    int count = 0;
    u32 turn = 0;
};

struct Warp {
    Barrier barrier;
    u64 slot[32];
    u32 a[32][4], b[32][2];
};

struct Message {  // between blocks, under way
    void* to;
    u32 bytes, value[4];
    std::atomic<int>* left;
};

struct Cluster {
    std::mutex mutex;
    std::vector<Message> messages;
    std::atomic<int> count{0};
    std::atomic<u32> turn{0};
    char* anchors[CLUSTER];
};

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

struct Fiber {
    ucontext_t context;  // its beginning
    jmp_buf place;       // where it has given way: unlike swapcontext(), a jump asks nothing of the system
    std::vector<std::vector<Copy>> copies = std::vector<std::vector<Copy>>(1);  // groups, the last one still open
    std::vector<char> stack;
    bool begun = false, done = false;
    u32 arrived_at = 0;
};

struct Block {
    Index index, grid;
    u32 rank;
    Cluster* cluster;
    Barrier barrier;
    std::vector<Warp> warps = std::vector<Warp>(THREADS / 32);
    std::vector<Fiber> fibers = std::vector<Fiber>(THREADS);
    std::vector<char> dynamic;
    jmp_buf scheduler;
    std::mt19937 chance;
    void (*run)(i64*);
    i64* args;
};

thread_local Block* block;
thread_local u32 current;
thread_local char anchor;

#define threadIdx (Index{current, 0})
#define blockIdx (block->index)
#define gridDim (block->grid)

inline void __trap() { std::abort(); }
inline void give_way() {
    if (!_setjmp(block->fibers[current].place)) _longjmp(block->scheduler, 1);
}
inline void go_on(Fiber& fiber) {
    if (_setjmp(block->scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

inline void meet(Barrier& barrier, int others) {
    const u32 turn = barrier.turn;
    if (++barrier.count == others) {
        barrier.count = 0, barrier.turn++;
    }
    do {
        give_way();  // the last one, too: others may be first then
    } while (barrier.turn == turn);
}

inline void __syncthreads() { meet(block->barrier, THREADS); }

// ---- warps

inline Warp& warp_of() { return block->warps[current / 32]; }
inline void __syncwarp() { meet(warp_of().barrier, 32); }

// What `read` makes of the values that all lanes have given.
template <class T, class Read>
inline auto exchange(T value, Read read) {
    Warp& warp = warp_of();
    warp.slot[current % 32] = 0;
    memcpy(&warp.slot[current % 32], &value, sizeof(T));
    __syncwarp();
    const auto result = read([&](u32 lane) {
        T other;
        memcpy(&other, &warp.slot[lane], sizeof(T));
        return other;
    });
    __syncwarp();
    return result;
}

template <class T>
inline T __shfl_sync(u32, T value, u32 lane) {
    return exchange(value, [&](auto of) { return of(lane % 32); });
}
template <class T>
inline T __shfl_xor_sync(u32, T value, u32 mask) {
    return exchange(value, [&](auto of) { return of((current % 32) ^ mask); });
}
template <class T>
inline T __shfl_up_sync(u32, T value, u32 by) {
    return exchange(value, [&](auto of) { return current % 32 < by ? value : of(current % 32 - by); });
}
inline u32 __ballot_sync(u32, bool value) {
    return exchange<u32>(value, [](auto of) {
        u32 all = 0;
        for (u32 lane = 0; lane < 32; lane++) all |= of(lane) << lane;
        return all;
    });
}
inline bool __any_sync(u32, bool value) { return __ballot_sync(~0u, value); }
inline u32 __reduce_or_sync(u32, u32 value) {
    return exchange(value, [](auto of) {
        u32 all = 0;
        for (u32 lane = 0; lane < 32; lane++) all |= of(lane);
        return all;
    });
}
inline u32 __reduce_add_sync(u32, u32 value) {
    return exchange(value, [](auto of) {
        u32 all = 0;
        for (u32 lane = 0; lane < 32; lane++) all += of(lane);
        return all;
    });
}
inline u32 sum_to_here(u32 value) {
    return exchange(value, [](auto of) {
        u32 all = 0;
        for (u32 lane = 0; lane <= current % 32; lane++) all += of(lane);
        return all;
    });
}
inline u32 atomicAdd(u32* to, u32 value) {
    const u32 before = *to;
    *to += value;
    return before;
}
inline void atomicOr(u32* to, u32 value) { *to |= value; }
// On memory that blocks share.
inline void atomicAdd(u64* to, u64 value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline void atomicMax(u64* to, u64 value) {
    for (u64 before = *to; before < value && !__atomic_compare_exchange_n(to, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {
    }
}

template <class T>
inline T* keep(T* pointer) {
    return pointer;
}
inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// ---- copies in the background: as late as they may be

inline void copy_async(uint4* to, const uint4* from) {
    block->fibers[current].copies.back().push_back({to, from, sizeof(uint4)});
}
inline void commit_copies() { block->fibers[current].copies.emplace_back(); }
template <int left>
inline void wait_for_copies() {
    auto& groups = block->fibers[current].copies;
    for (; groups.size() > left + 1; groups.erase(groups.begin()))
        for (const Copy& copy : groups[0]) memcpy(copy.to, copy.from, copy.bytes);
}

// ---- clusters and launches

inline void wait_for_kernels() {}
inline void release_kernels() {}
inline u32 cluster_rank() { return block->rank; }

inline void cluster_arrive() {
    Cluster& cluster = *block->cluster;
    block->fibers[current].arrived_at = cluster.turn;
    if (++cluster.count == CLUSTER * THREADS) {
        cluster.count = 0;
        cluster.turn++;
    }
}
inline void cluster_wait() {
    do {
        give_way();
    } while (block->cluster->turn == block->fibers[current].arrived_at);
}
inline std::atomic<int> meetings{0};  // of a block with its cluster, but the one that begins in begin()
inline void cluster_sync() {
    if (current == 0) meetings++;
    cluster_arrive();
    cluster_wait();
}

inline void* there(const void* mine, u32 rank) {
    return block->cluster->anchors[rank] + ((const char*)mine - &anchor);
}
inline u32 load_there(const u32* mine, u32 rank) { return *(volatile u32*)there(mine, rank); }
inline void store_there(u32* mine, u32 rank, u32 value) { *(volatile u32*)there(mine, rank) = value; }
inline void store_there(float* mine, u32 rank, float value) { *(volatile float*)there(mine, rank) = value; }

inline void cluster_arrive_relaxed() { cluster_arrive(); }

// Bytes that are missing, and very many of them until it is known how many are expected.
inline void mbarrier_init(u64* mbarrier) { *(std::atomic<int>*)mbarrier = 1 << 24; }
inline void mbarrier_expect(u64* mbarrier, u32 bytes) { *(std::atomic<int>*)mbarrier += (int)bytes - (1 << 24); }

template <class T>
inline void store_async(T* mine, u32 rank, const T& value, u64* mbarrier) {
    Message message = {there(mine, rank), sizeof(T), {}, (std::atomic<int>*)there(mbarrier, rank)};
    memcpy(message.value, &value, sizeof(T));
    std::lock_guard<std::mutex> alone(block->cluster->mutex);
    block->cluster->messages.push_back(message);
}

inline void mbarrier_wait(u64* mbarrier) {
    while (*(std::atomic<int>*)mbarrier != 0) give_way();
}

// Some of the messages arrive, in any order.
inline void deliver(Cluster& cluster, std::mt19937& chance) {
    std::lock_guard<std::mutex> alone(cluster.mutex);
    auto& messages = cluster.messages;
    for (size_t some = chance() % (messages.size() + 1); some; some--) {
        std::swap(messages[chance() % messages.size()], messages.back());
        const Message& one = messages.back();
        memcpy(one.to, one.value, one.bytes);
        *one.left -= one.bytes;
        messages.pop_back();
    }
}

// Where tensors begin and end that the kernel was given, and how often something else was read.
inline std::vector<std::pair<i64, i64>> given;
inline std::atomic<int> outside{0};

template <class T>
inline T load_if(const void* from, bool there) {
    const auto holds = [&](const auto& one) { return one.first <= (i64)from && (i64)from + (i64)sizeof(T) <= one.second; };
    if (there && std::none_of(given.begin(), given.end(), holds)) outside++, there = false;
    if ((i64)from % sizeof(T) && there) outside++, there = false;
    return there ? *(const T*)from : T{};
}
inline uint4 load_16(const void* from, bool there) { return load_if<uint4>(from, there); }
inline uint2 load_8(const void* from, bool there) { return load_if<uint2>(from, there); }
inline u32 load_4(const void* from, bool there) { return load_if<u32>(from, there); }

template <class T>
inline T load_once(const T* from) {
    const auto holds = [&](const auto& one) { return one.first <= (i64)from && (i64)(from + 1) <= one.second; };
    if ((i64)from % sizeof(T) == 0 && std::any_of(given.begin(), given.end(), holds)) return *from;
    outside++;
    return {};
}
inline float load_constant(const float* from) { return load_once(from); }

// ---- numbers

inline float power(float x) { return exp2f(x); }
inline float from_half(u32 bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float value = exponent == 31 ? (digits ? NOT_A_NUMBER : INF)
                  : exponent     ? std::ldexp(1024.0f + digits, exponent - 25)
                                 : std::ldexp((float)digits, -24);
    return bits & 0x8000 ? -value : value;
}

// c += a b of 16 rows and 8 columns: what each thread has of them, numbers of BITS bits in the order of `mma.sync`.
template <int BITS, class T, class Read>
inline void multiply(T (&c)[4], const u32 (&a)[4], const u32 (&b)[2], Read read) {
    constexpr u32 EACH = 32 / BITS, HALF = 4 * EACH;  // numbers of a register, and of a row in four threads
    Warp& warp = warp_of();
    const u32 lane = current % 32;
    memcpy(warp.a[lane], a, sizeof(a)), memcpy(warp.b[lane], b, sizeof(b));
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const u32 row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (u32 k = 0; k < 2 * HALF; k++) {
            const u32 quad = k % HALF / EACH, half = k / HALF, shift = k % EACH * BITS;
            c[i] += read(warp.a[row * 4 + quad][i / 2 + half * 2] >> shift) * read(warp.b[column * 4 + quad][half] >> shift);
        }
    }
    __syncwarp();
}
inline void multiply(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply<8>(c, a, b, [](u32 bits) { return (int)(signed char)bits; });
}

inline float from_bfloat16(u32 bits) { return __uint_as_float(bits << 16); }

inline u32 to_half(float value) {  // to the nearest, of two the even one
    const u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000;
    if (value != value) return 0x7fff;
    const float size = std::fabs(value);
    if (size >= 65520) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);  // size is below 2 ** exponent
    const float unit = std::ldexp(1.0f, (exponent > -13 ? exponent : -13) - 11);
    const float whole = std::nearbyint(size / unit) * unit;
    if (whole < std::ldexp(1.0f, -14)) return sign | (u32)std::ldexp(whole, 24);
    std::frexp(whole, &exponent);
    return sign | (u32)(exponent + 14) << 10 | ((u32)std::ldexp(whole, 11 - exponent) & 1023);
}

inline u32 to_bfloat16(float value) {
    const u32 bits = __float_as_uint(value);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}

inline u32 pack_half(float low, float high) { return to_half(low) | to_half(high) << 16; }
inline u32 pack_bfloat16(float low, float high) { return to_bfloat16(low) | to_bfloat16(high) << 16; }

inline u32 mask_xor(u32 bits, u32 mask, u32 other) { return bits & mask ^ other; }
inline u32 subtract_half(u32 these, u32 those) {
    const auto of = [&](u32 shift) { return from_half(these >> shift & 0xffff) - from_half(those >> shift & 0xffff); };
    return pack_half(of(0), of(16));
}
inline u32 subtract_bfloat16(u32 these, u32 those) {
    const auto of = [&](u32 shift) { return from_bfloat16(these >> shift & 0xffff) - from_bfloat16(those >> shift & 0xffff); };
    return pack_bfloat16(of(0), of(16));
}

inline u32 transpose(u32 mine) {
    const u32 row = current % 32 / 4, column = current % 4 * 2;
    return exchange(mine, [&](auto of) {
        const auto entry = [&](u32 r, u32 c) { return of(4 * r + c / 2) >> c % 2 * 16 & 0xffff; };
        return entry(column, row) | entry(column + 1, row) << 16;
    });
}

inline void multiply_half(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply<16>(c, a, b, [](u32 bits) { return from_half(bits & 0xffff); });
}
inline void multiply_bfloat16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply<16>(c, a, b, [](u32 bits) { return from_bfloat16(bits & 0xffff); });
}

// ---- running a kernel

template <class... P, size_t... I>
inline void call(void (*kernel)(P...), i64* args, std::index_sequence<I...>) {
    kernel((P)args[I]...);
}
template <class... P>
inline void call(void (*kernel)(P...), i64* args) {
    call(kernel, args, std::index_sequence_for<P...>{});
}

inline void run_fiber() {
    block->run(block->args);
    block->fibers[current].done = true;
    give_way();
}

inline void run_block(Block* mine, std::atomic<int>* ready) {
    block = mine;
    mine->cluster->anchors[mine->rank] = &anchor;
    ++*ready;
    while (*ready < CLUSTER) sched_yield();
    std::vector<u32> order;
    for (u32 i = 0; i < THREADS; i++) {
        Fiber& fiber = mine->fibers[i];
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
        order.push_back(i);
    }
    for (bool left = true; left;) {
        left = false;
        const u32 first = mine->chance() % THREADS;
        u32 step;  // to all of them
        do {
            step = mine->chance() % THREADS;
        } while (std::gcd(step, (u32)THREADS) != 1);
        for (u32 i = 0; i < THREADS; i++) {
            current = order[(first + i * step) % THREADS];
            if (mine->fibers[current].done) continue;
            left = true;
            go_on(mine->fibers[current]);
        }
        deliver(*mine->cluster, mine->chance);
        sched_yield();
    }
    ++*ready;
    while (*ready < 2 * CLUSTER) sched_yield();  // others may look here until they end
}

inline void launch(void (*run)(i64*), i64* args, int width, int height, int shared, u32 seed) {
    for (int y = 0; y < height; y++) {
        for (int x = 0; x < width; x += CLUSTER) {
            Cluster cluster;
            std::atomic<int> ready{0};
            std::vector<Block> blocks(CLUSTER);
            std::vector<std::thread> threads;
            for (int r = 0; r < CLUSTER; r++) {
                Block& one = blocks[r];
                one.index = {(u32)(x + r), (u32)y}, one.grid = {(u32)width, (u32)height}, one.rank = r, one.cluster = &cluster;
                one.dynamic.assign(shared + 16, (char)0xff);  // what nobody has written is no number
                one.chance.seed(seed + 131 * y + x + r), one.run = run, one.args = args;
                threads.emplace_back(run_block, &one, &ready);
            }
            for (auto& thread : threads) thread.join();
        }
    }
}
