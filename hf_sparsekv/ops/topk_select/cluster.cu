// Selection from long rows by clusters of thread blocks, which hold a row in their shared memory (Hopper and later).
//
// Each of CLUSTER blocks holds a part of one row, and each warp a stretch of that: read, or computed from labels.
// 1. Mean and deviation of a quarter of the scores give a number that more than k of them reach, but not many more.
//    What reaches it moves to the front of each warp's stretch.
// 2. Together the blocks count these by bins, up to the largest score. The bin that holds the score of rank k has few.
// 3. Every block is handed these few, and finds the threshold among them by itself. As it then knows how many entries
//    each block takes, it writes its ids to their place, ascending.
//
// The guess never shows in the result: where too few reach it, or too many are in the bin, the row is read or
// computed again, and its scores are counted by their bits, LOG_BINS a pass.
//
// Blocks hand over what they know by writing to one another's shared memory ("Distributed Shared Memory", CUDA C++
// Programming Guide): three barriers of a cluster, and two more for each further pass.

#define INF __int_as_float(0x7f800000)
#define BINS (1 << LOG_BINS)
#define WARPS (THREADS / 32)

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static_assert(BINS <= THREADS, "a thread has a bin");
static_assert(WARPS >= CLUSTER, "a warp counts what a block takes");

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

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

__device__ __forceinline__ u32 load_there(u32 address) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_there(u32 address, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Numbers that compare as the scores do.
__device__ __forceinline__ u32 ordered(float s) {
    const u32 bits = __float_as_uint(s + 0.0f);  // -0.0 ties with 0.0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Where the upper p of a normal distribution begin, roughly: Tukey's lambda with 0.14.
__device__ __forceinline__ float deviate(float p) {
    return 4.91f * (exp2f(0.14f * log2f(1.0f - p)) - exp2f(0.14f * log2f(p)));
}

// How a pass counts: scores from `low` on by `scale`, or ordered keys `first` .. `first + span` by 2 ** shift.
struct Pass {
    bool linear;
    float low, scale;
    u32 first, span;
    int shift;
};

// The bin of a score; -1 for one that this pass does not count. A larger score never has a smaller bin.
__device__ __forceinline__ int bin_of(const Pass& pass, float s) {
    if (pass.linear) return s >= pass.low ? min((int)((s - pass.low) * pass.scale), BINS - 1) : -1;
    const u32 behind = ordered(s) - pass.first;  // wraps for what lies before
    return s != -INF && behind <= pass.span ? (int)(behind >> pass.shift) : -1;
}

// What a row's scores have in common, of those that this thread has met. Of some neighbouring ones one is a sample.
struct Met {
    float sum, square, high;
    u32 sampled, usable;

    __device__ __forceinline__ void add(const Met& other) {
        sum += other.sum, square += other.square, high = fmaxf(high, other.high);
        sampled += other.sampled, usable += other.usable;
    }

    __device__ __forceinline__ float hold(float s) {  // what is no number cannot be chosen
        s = s == s ? s : -INF;
        usable += s != -INF;
        return s;
    }

    __device__ __forceinline__ void sample(float s) {
        if (s != -INF) sampled++, sum += s, square += s * s, high = fmaxf(high, s);
    }
};

struct Told {  // by a block to all of its cluster
    Met met;
    u32 listed, sure;  // entries of the threshold's bin, and of those above it
    float list[LIST];
};

struct Shared {
    Told told[CLUSTER];
    u32 hist[BINS];
    u64 warp_counts[WARPS];
    Met met[WARPS];
    u32 warp_taken[WARPS];
    u32 above[CLUSTER], ties[CLUSTER];
    u32 slot, bin, most, over, sure, own;  // what the thread found that has the threshold's bin
    float threshold;
    u32 taken_over;
};

// A row of `live` entries and this block's part of it. All warps but the last ones have as many, a multiple of 64.
struct Part {
    int live, stretch, start, count;

    __device__ __forceinline__ Part(int entries) : live(entries) {
        stretch = (live + CLUSTER * WARPS * 64 - 1) / (CLUSTER * WARPS * 64) * 64;
        start = min((int)cluster_rank() * stretch * WARPS, live), count = min(stretch * WARPS, live - start);
    }
};

// Tell all blocks what this one's scores have in common, and take from all of them a pass, and how many can be chosen.
__device__ __forceinline__ void guess(Shared& at, Met& met, u32 k, Pass& pass) {
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int d = 16; d; d /= 2) {
        met.sum += __shfl_xor_sync(~0u, met.sum, d), met.square += __shfl_xor_sync(~0u, met.square, d);
        met.high = fmaxf(met.high, __shfl_xor_sync(~0u, met.high, d));
    }
    met.sampled = __reduce_add_sync(~0u, met.sampled), met.usable = __reduce_add_sync(~0u, met.usable);
    if (lane == 0) at.met[warp] = met;
    __syncthreads();
    cluster_wait();  // for the arrival in begin(): every block is there
    if (thread < CLUSTER) {  // one thread tells one block
        met = at.met[0];
        for (int w = 1; w < WARPS; w++) met.add(at.met[w]);
        Told* mine = &at.told[cluster_rank()];
        store_there(there(&mine->met.sum, thread), __float_as_uint(met.sum));
        store_there(there(&mine->met.square, thread), __float_as_uint(met.square));
        store_there(there(&mine->met.high, thread), __float_as_uint(met.high));
        store_there(there(&mine->met.sampled, thread), met.sampled);
        store_there(there(&mine->met.usable, thread), met.usable);
    }
    cluster_sync();
    met = at.told[0].met;
    for (int r = 1; r < CLUSTER; r++) met.add(at.told[r].met);
    const float mean = met.sum / met.sampled, share = fminf(fmaxf((float)k / met.usable, 0.0001f), 0.9999f);
    const float spread = sqrtf(fmaxf(met.square / met.sampled - mean * mean, 0.0f));
    pass.low = mean + (deviate(share) - MARGIN) * spread;
    pass.scale = BINS / (met.high - pass.low);
    pass.first = 0, pass.span = ~0u, pass.shift = 32 - LOG_BINS;
    // Not so what is infinite, or no number, or all one value.
    pass.linear = met.high > pass.low && met.high < INF && pass.low > -INF && pass.scale < INF;
}

// Leave in `at` which bin holds the entry of rank k, `over` of which lie above all bins.
__device__ __forceinline__ void find_bin(Shared& at, u32 k, u32 over) {
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    // Entries from the last bin down to this thread's: of the row in the upper half, of this block in the lower.
    u64 mine = 0;
    u32 most = 0;
    const int b = BINS - 1 - (int)thread;
    if (b >= 0) {
        u32 total = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) {
            const u32 c = load_there(there(&at.hist[b], r));
            total += c, most = max(most, c);
        }
        mine = (u64)total << 32 | at.hist[b];
    }
    u64 with = mine;
    for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(~0u, with, d);
        if (lane >= d) with += other;
    }
    if (lane == 31) at.warp_counts[warp] = with;
    __syncthreads();
    for (int w = 0; w < warp; w++) with += at.warp_counts[w];
    const u64 behind = with - mine;
    if (over + (u32)(behind >> 32) < k && k <= over + (u32)(with >> 32)) {
        at.bin = b, at.most = most, at.over = (u32)(behind >> 32), at.sure = (u32)behind;
        at.own = (u32)mine;
    }
    __syncthreads();
}

// Write the ids of the `k` best of a row to `to`. `fill(held, first, length)` gives a warp its stretch of the scores,
// entries `first ..` of the block's part, and what they have in common.
template <class Fill>
__device__ __forceinline__ void choose(float* held, const Part& its, u32 k, const Fill& fill, int* to, const int* of,
                                       int block_size) {
    __shared__ Shared at;
    const u32 rank = cluster_rank(), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 lanes_before = (1u << lane) - 1;
    const int first = min((int)warp * its.stretch, its.count), length = min(its.stretch, its.count - first);
    u16* where = (u16*)(held + its.stretch * WARPS);  // entry of the block's part that a score has come from

    int kept = length;   // of the warp's stretch
    bool moved = false;  // and whether they are where they were
    u32 usable = 0, over = 0, sure = 0;  // entries that can be chosen; that are for certain: of the row, of this block
    bool equal = false;                  // all that the threshold's bin holds is one score
    float threshold = -INF;
    Pass pass;
    if (thread < BINS) at.hist[thread] = 0;
    if (thread == 0) at.slot = 0, at.bin = BINS;
    for (bool again = false, found = false; !found; again = true) {
        Met met = fill(held + first, first, length);
        if (!again) {
            guess(at, met, k, pass);
            usable = met.usable;
            if (usable <= k) break;
        }
        moved = pass.linear, kept = length;
        if (moved) {
            kept = 0;
            for (int i = lane; i - (int)lane < length; i += 32) {
                const float s = i < length ? held[first + i] : -INF;
                const bool keep = s >= pass.low;
                const u32 all = __ballot_sync(~0u, keep);
                if (keep) {
                    const int to = first + kept + __popc(all & lanes_before);
                    held[to] = s, where[to] = first + i;
                }
                kept += __popc(all);
            }
            __syncwarp();
        }
        while (true) {
            for (int i = lane; i < kept; i += 32) {
                const int b = bin_of(pass, held[first + i]);
                if (b >= 0) atomicAdd(&at.hist[b], 1);
            }
            cluster_sync();
            find_bin(at, k, over);
            const u32 bin = at.bin;
            equal = !pass.linear && pass.shift == 0;
            found = bin < BINS && (equal || at.most <= LIST);
            const bool narrower = !found && !pass.linear;
            if (found || narrower) over += at.over, sure += at.sure;
            if (found) {
                if (equal) threshold = from_ordered(pass.first + bin);
                for (int i = lane; !equal && i < kept; i += 32) {
                    const float s = held[first + i];
                    if (bin_of(pass, s) == (int)bin) {
                        const u32 slot = atomicAdd(&at.slot, 1);
                        for (int r = 0; r < CLUSTER; r++)
                            store_there(there(&at.told[rank].list[slot], r), __float_as_uint(s));
                    }
                }
                if (thread < CLUSTER) {
                    store_there(there(&at.told[rank].sure, thread), sure);
                    store_there(there(&at.told[rank].listed, thread), at.own);
                }
            } else if (narrower) {
                pass.first += bin << pass.shift, pass.span = (1u << pass.shift) - 1;
                pass.shift = max(pass.shift - LOG_BINS, 0);
            }
            cluster_sync();  // all have read, and know
            if (found) break;
            if (thread < BINS) at.hist[thread] = 0;
            if (thread == 0) at.bin = BINS;
            __syncthreads();
            if (!narrower) break;
        }
        pass.linear = false;  // by their bits then, all of them
    }

    u32 need = 0;  // ties that are taken
    if (usable > k) {
        const u32 left = k - over;  // of those that are listed
        if (!equal) {
            u32 total = 0;
            for (int r = 0; r < CLUSTER; r++) total += at.told[r].listed;
            for (u32 i = thread; i < total; i += THREADS) {
                u32 r = 0, j = i;
                while (j >= at.told[r].listed) j -= at.told[r++].listed;
                const float s = at.told[r].list[j];
                u32 more = 0, same = 0;
                for (int q = 0; q < CLUSTER; q++) {
                    for (u32 p = 0; p < at.told[q].listed; p++) {
                        const float other = at.told[q].list[p];
                        more += other > s, same += other == s;
                    }
                }
                if (more < left && left <= more + same) at.threshold = s, at.taken_over = over + more;
            }
            __syncthreads();
            threshold = at.threshold, over = at.taken_over;
        }
        need = k - over;
        if (warp < CLUSTER) {
            const Told& told = at.told[warp];
            u32 above = 0, ties = 0;
            if (equal) {
                ties = told.listed;
            } else {
                for (u32 i = lane; i < told.listed; i += 32) {
                    above += told.list[i] > threshold, ties += told.list[i] == threshold;
                }
                above = __reduce_add_sync(~0u, above), ties = __reduce_add_sync(~0u, ties);
            }
            if (lane == 0) at.above[warp] = told.sure + above, at.ties[warp] = ties;
        }
    } else if (thread < CLUSTER) {
        at.above[thread] = at.told[thread].met.usable, at.ties[thread] = 0;
    }

    // Count what each warp takes, then write.
    u32 warp_above = 0, warp_ties = 0;
    for (int i = lane; i < kept; i += 32) {
        const float s = held[first + i];
        warp_above += s > threshold, warp_ties += s == threshold;
    }
    warp_above = __reduce_add_sync(~0u, warp_above), warp_ties = __reduce_add_sync(~0u, warp_ties);
    if (lane == 0) at.warp_taken[warp] = warp_above | warp_ties << 16;
    __syncthreads();
    // The next kernel may come: what is left is short.
    asm volatile("griddepcontrol.launch_dependents;");
    u32 above = 0, ties = 0;
    for (int r = 0; r < rank; r++) above += at.above[r], ties += at.ties[r];
    for (int w = 0; w < warp; w++) above += at.warp_taken[w] & 0xffff, ties += at.warp_taken[w] >> 16;
    for (int i = lane; i - (int)lane < kept; i += 32) {
        const float s = i < kept ? held[first + i] : -INF;
        const bool over = s > threshold, tie = need && s == threshold;
        const u32 overs = __ballot_sync(~0u, over), tied = __ballot_sync(~0u, tie);
        const u32 my_ties = ties + __popc(tied & lanes_before);
        if (over || (tie && my_ties < need)) {
            int id = its.start + (moved ? (int)where[first + i] : first + i);
            if (of) id = of[id / block_size] * block_size + id % block_size;
            to[above + __popc(overs & lanes_before) + min(my_ties, need)] = id;
        }
        above += __popc(overs), ties += __popc(tied);
    }
    if (rank == CLUSTER - 1)
        for (u32 i = min(usable, k) + thread; i < k; i += THREADS) to[i] = -1;
}

// Of each kernel the first.
__device__ __forceinline__ void begin() {
    cluster_arrive();  // waited for before anything is told
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    topk_select_cluster_kernel(const float* scores, i64 scores_batch, i64 scores_head, const int* blocks,
                               i64 blocks_batch, i64 blocks_head, int* out, i64 out_batch, i64 out_head,
                               const int* rows, i64 heads, i64 n, i64 tokens, i64 k, i64 block_size) {
    extern __shared__ float held[];
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int lane = threadIdx.x % 32;
    begin();
    const int sealed = rows ? rows[2 * i_batch + 1] : 0;
    const Part its(rows ? min((int)n, (sealed + (int)tokens - 1) / (int)tokens) : (int)n);
    const float* row = scores + i_batch * scores_batch + i_head * scores_head + its.start;
    const auto fill = [&](float* to, int first, int length) {
        Met met = {0, 0, -INF, 0, 0};
        const float* from = row + first;
        const int whole = ((u64)from & 15) ? 0 : length & ~3;
#pragma unroll 2
        for (int i = 4 * lane; i < whole; i += 128) {
            float4 four = *(const float4*)(from + i);
            four.x = met.hold(four.x), four.y = met.hold(four.y);
            four.z = met.hold(four.z), four.w = met.hold(four.w);
            *(float4*)(to + i) = four;
            met.sample(four.x);
        }
        for (int i = whole + lane; i < length; i += 32) {
            to[i] = met.hold(from[i]);
            if (i % 4 == 0) met.sample(to[i]);
        }
        __syncwarp();
        return met;
    };
    choose(held, its, (u32)k, fill, out + i_batch * out_batch + i_head * out_head,
           blocks ? blocks + i_batch * blocks_batch + i_head * blocks_head : nullptr, (int)block_size);
}

#ifdef GROUP
// Scores of tokens from packed labels, by 8-bit products of tensor cores: digits 0 to 15 are rows, and a head's query
// in fixed point is two columns, 128 a + b. Sums are exact, so all that is rounded are the queries, to a 32,512th of
// their largest number. The mean over a group is one query. (As token_score/tensor_core.py.)

#define WORDS (WIDTH / 16)             // of a token's codes, in four bytes each, that a thread has
#define VECTORS (MEAN ? 1 : GROUP)     // queries
#define COLUMNS ((VECTORS + 3) / 4)    // products of eight columns
#define CHANNELS (2 * WIDTH)
#define LARGEST (127 * 128.0f)

__device__ __forceinline__ float from_half(u32 bits) {
    float value;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits & 0xffff));
    return value;
}

__device__ __forceinline__ float from_query(u16 bits) {
    return BFLOAT16 ? __uint_as_float((u32)bits << 16) : from_half(bits);
}

// c += a b, of 16 x 32 and 32 x 8 numbers of 8 bits
__device__ __forceinline__ void multiply(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct Queries {
    signed char parts[4 * COLUMNS][2][CHANNELS];  // upper and lower, of the label channels
    float unit[4 * COLUMNS], total[4 * COLUMNS];
};

// Labels of 64 tokens: each thread has WORDS words of eight of them, and the scales and zero points of these.
struct Tile {
    u32 code[4][2][WORDS], pair[4][2];
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    label_select_cluster_kernel(const u16* q, i64 q_batch, i64 q_head, i64 q_dim, const unsigned char* codes,
                                i64 codes_block, i64 codes_head, const u32* pairs, i64 pairs_block, i64 pairs_head,
                                const int* channels, i64 channels_batch, i64 channels_head, const int* table,
                                i64 table_row, int* out, i64 out_batch, i64 out_head, const int* rows, i64 heads,
                                i64 n, i64 k, i64 log_block, i64 sinks) {
    extern __shared__ float held[];
    __shared__ Queries queries;
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, quad = lane % 4;
    begin();
    const Part its(min((int)n, rows[2 * i_batch + 1]));

    // A warp makes two columns of each query.
    channels += i_batch * channels_batch + i_head * channels_head;
    q += i_batch * q_batch + i_head * GROUP * q_head;
    for (int v = warp; v < 4 * COLUMNS; v += WARPS) {
        float value[(CHANNELS + 31) / 32], most = 0, total = 0;
#pragma unroll
        for (int e = 0; e < (CHANNELS + 31) / 32; e++) {
            value[e] = 0;
            if (e * 32 + lane < CHANNELS && v < VECTORS) {
                const u16* from = q + channels[e * 32 + lane] * q_dim;
                if (MEAN) {
                    for (int h = 0; h < GROUP; h++) value[e] += from_query(from[h * q_head]);
                    value[e] /= GROUP;
                } else {
                    value[e] = from_query(from[v * q_head]);
                }
            }
            most = fmaxf(most, fabsf(value[e])), total += value[e];
        }
        for (int d = 16; d; d /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d)), total += __shfl_xor_sync(~0u, total, d);
        }
        const float unit = fmaxf(most, 1e-30f) / LARGEST;
#pragma unroll
        for (int e = 0; e < (CHANNELS + 31) / 32; e++) {
            if (e * 32 + lane < CHANNELS) {
                const float whole = floorf(value[e] / unit + 0.5f);           // -16256 .. 16256
                const float upper = floorf(whole * 0.0078125f + 0.5f);        // -127 .. 127
                queries.parts[v][0][e * 32 + lane] = (signed char)(int)upper;
                queries.parts[v][1][e * 32 + lane] = (signed char)(int)(whole - 128 * upper);  // -64 .. 63
            }
        }
        // A query that is infinite, or no number, scores nothing.
        if (lane == 0) queries.unit[v] = unit, queries.total[v] = fabsf(total) < INF ? total : __int_as_float(0x7fc00000);
    }
    __syncthreads();
    u32 column[COLUMNS][WORDS][2];  // of the products' right side: what this thread holds
    float unit[COLUMNS], total[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        unit[c] = queries.unit[4 * c + quad], total[c] = queries.total[4 * c + quad];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const signed char* part = queries.parts[4 * c + row / 2][row % 2] + 4 * (quad * WORDS + w);
            column[c][w][0] = *(const u32*)part, column[c][w][1] = *(const u32*)(part + WIDTH);
        }
    }

    table += i_batch * table_row, codes += i_head * codes_head, pairs += i_head * pairs_head;
    const int in_block = (1 << log_block) - 1;
    const auto fill = [&](float* to, int first, int length) {
        Met met = {0, 0, -INF, 0, 0};
        for (int from = 0; from < length; from += 512) {
            const int left = min(512, length - from), token = its.start + first + from;
            // Each lane looks up the block of 16 tokens.
            int physical = -1;
            if (16 * (int)lane < left) physical = table[(token + 16 * lane) >> log_block];
            Tile next;
            const auto load = [&](int t) {
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const int block = __shfl_sync(~0u, physical, (4 * t + m) % 32);
                    const int at = ((token + 64 * t + 16 * m) & in_block) + row;
                    const unsigned char* p_code = codes + block * codes_block + at * WIDTH + 4 * WORDS * quad;
                    const u32* p_pair = pairs + block * pairs_block + at;
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        next.pair[m][h] = 0x7e000000;  // a zero point that is no number: no score
                        if (block >= 0) {
                            next.pair[m][h] = p_pair[8 * h];
#pragma unroll
                            for (int w = 0; w < WORDS; w++)  // one load, of as many words
                                next.code[m][h][w] = *(const u32*)(p_code + 8 * h * WIDTH + 4 * w);
                        } else {
#pragma unroll
                            for (int w = 0; w < WORDS; w++) next.code[m][h][w] = 0;
                        }
                    }
                }
            };
            load(0);
            for (int t = 0; 64 * t < left; t++) {
                const Tile tile = next;
                if (64 * (t + 1) < left) load(t + 1);
                float best[8];  // of rows 16 m + 8 h + row: of the queries of this quad
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    best[2 * m] = best[2 * m + 1] = -INF;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        int product[4] = {0, 0, 0, 0};
#pragma unroll
                        for (int w = 0; w < WORDS; w++) {
                            const u32 upper = tile.code[m][0][w], lower = tile.code[m][1][w];
                            const u32 digits[4] = {upper & 0x0f0f0f0f, lower & 0x0f0f0f0f, (upper >> 4) & 0x0f0f0f0f,
                                                   (lower >> 4) & 0x0f0f0f0f};
                            multiply(product, digits, column[c][w]);
                        }
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            // label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
                            const float sum = (float)(product[2 * h] * 128 + product[2 * h + 1]) * unit[c];
                            const u32 pair = tile.pair[m][h];
                            const float s = from_half(pair) * sum + from_half(pair >> 16) * total[c];
                            if (4 * c + quad < VECTORS) best[2 * m + h] = fmaxf(best[2 * m + h], s);
                        }
                    }
                }
                // The largest of the four threads of a quad: each ends with two of the eight rows.
                const bool odd = quad & 1, high = quad & 2;
                float four[4], two[2];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float sent = odd ? best[i] : best[4 + i];
                    four[i] = fmaxf(odd ? best[4 + i] : best[i], __shfl_xor_sync(~0u, sent, 1));
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float sent = high ? four[i] : four[2 + i];
                    two[i] = fmaxf(high ? four[2 + i] : four[i], __shfl_xor_sync(~0u, sent, 2));
                    const int at = from + 64 * t + 16 * (2 * odd + high) + 8 * i + row;
                    if (at < length) {
                        if (its.start + first + at < sinks) two[i] = -INF;
                        to[at] = met.hold(two[i]);
                        if (i == 0) met.sample(to[at]);
                    }
                }
            }
        }
        __syncwarp();
        return met;
    };
    choose(held, its, (u32)k, fill, out + i_batch * out_batch + i_head * out_head, nullptr, 1);
}
#endif
