// Selection from long rows by clusters of thread blocks (Hopper and later).
//
// Each of CLUSTER blocks has a part of one row, and each warp a stretch of that.
// 1. Every block reads the same sample of the whole row. Its mean and deviation give a guess that slightly more than k
//    scores reach. All blocks compute the same guess, so none waits for another. A warp keeps the scores of its stretch
//    that reach the guess, in shared memory.
// 2. Together the blocks count these by bins, up to the largest score. The bin with the score of rank k has few.
// 3. Every block receives these few, and finds the threshold among them independently. It then knows how many entries
//    each block takes, and writes its ids to their positions, ascending.
//
// The guess never affects the result. If too few scores reach it, or too many are in the bin, the row is read again,
// and its scores are counted by their bits, LOG_BINS a pass.
//
// Blocks exchange results by asynchronous writes (st.async) to each other's shared memory ("Distributed Shared Memory",
// CUDA C++ Programming Guide). Only further passes, which few rows need, use barriers of the cluster, because these
// fence all of the GPU's memory.

#define BINS (1 << LOG_BINS)
#define WARPS (THREADS / 32)
#define PIECES 2              // of four entries, that a lane reads at once
#define TILE (128 * PIECES)   // entries of a warp
#define AHEAD (3 - RESIDENT)  // tiles in flight; one if two blocks share the registers
#define LOWEST __uint_as_float(0xff7fffffu)  // finite number

static_assert(BINS <= THREADS, "a thread has a bin");
static_assert(WARPS >= CLUSTER, "a warp counts what a block takes");
static_assert(WARPS <= 32, "a lane has what a warp has seen");
static_assert(PIECES <= 2, "a lane counts each in 16 bits");
static_assert(RESIDENT <= 2, "a tile is on its way");

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

// What a pass keeps, scores from `low` on, and how it counts these: by `scale`, or ordered keys `first` ..
// `first + span` by 2 ** shift.
struct Pass {
    bool linear;
    float low, scale;
    u32 first, span;
    int shift;
};

// By bits, whatever can be chosen.
__device__ __forceinline__ Pass all_of_them() { return {false, LOWEST, 0, 0, ~0u, 32 - LOG_BINS}; }

// The bin of a score that was kept; -1 for one that this pass does not count. A larger score never has a smaller bin.
__device__ __forceinline__ int bin_of(const Pass& pass, float s) {
    if (pass.linear) return (int)fminf((s - pass.low) * pass.scale, BINS - 1);  // no int holds 1e30
    const u32 behind = ordered(s) - pass.first;  // wraps for what lies before
    return behind <= pass.span ? (int)(behind >> pass.shift) : -1;
}

// What some scores have in common.
struct alignas(16) Sample {
    float sum, square, high;
    u32 counts;  // lower half: scores that can be chosen; upper half: all scores

    __device__ __forceinline__ void add(float s) {
        counts += 1 << 16;
        if (s > -INF) counts++, sum += s, square += s * s, high = fmaxf(high, s);
    }

    // The same in all lanes, and in all blocks that do so.
    __device__ __forceinline__ void of_warp() {
        for (int d = 16; d; d /= 2) {
            sum += __shfl_xor_sync(~0u, sum, d), square += __shfl_xor_sync(~0u, square, d);
            high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
        }
        counts = __reduce_add_sync(~0u, counts);
    }
};

struct Told {  // by a block to all of its cluster
    u32 listed, sure;  // entries of the threshold's bin, and of those above it
    float list[LIST];
};

struct Shared {
    Told told[CLUSTER];
    u32 hist[BINS];
    u64 warp_counts[WARPS];
    Sample samples[WARPS];
    u32 warp_taken[WARPS];
    u32 above[CLUSTER], ties[CLUSTER];
    u32 slot, most, over, sure, own;  // what the thread found that has the threshold's bin
    int bin;
    float threshold;
    u32 taken_over;
};

struct Exchange {
    u64 counts, list;
    __align__(16) u32 hists[CLUSTER][BINS];  // of each block
};

// A row of `live` entries and this block's part of it. All warps but the last ones have as many, a multiple of 32.
struct Part {
    int live, stretch, start, count;

    __device__ __forceinline__ Part(int entries) : live(entries) {
        stretch = (live + CLUSTER * WARPS * 32 - 1) / (CLUSTER * WARPS * 32) * 32;
        start = min((int)cluster_rank() * stretch * WARPS, live), count = min(stretch * WARPS, live - start);
    }

    // Of a warp's stretch, in this part.
    __device__ __forceinline__ int first_of(int warp) const { return min(warp * stretch, count); }
};

// Four of a row's `n` entries, or of less than four none. Two threads read 32 bytes in a row, and THREADS / 2 of these
// are spread over all of it. `place`: of the first.
__device__ __forceinline__ float4 read_sample(const float* row, int n, int& place) {
    const int aligned = -(int)((u64)row / 4) & 7;  // first entry that 32 bytes begin with
    place = aligned + ((int)(threadIdx.x / 2) * n / (THREADS / 2) & ~7) + 4 * (threadIdx.x % 2);
    if (place + 4 <= n) return *(const float4*)(row + place);
    return {-INF, -INF, -INF, -INF};
}

// A pass over what k of `live` entries are chosen from, by a sample of the first ones: every block gets the same.
__device__ __forceinline__ Pass guess(Shared& at, const float4& four, int place, int live, u32 k) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sample all = {0, 0, -INF, 0};
    const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (place + i < live) all.add(each[i]);
    all.of_warp();
    if (lane == 0) at.samples[warp] = all;
    __syncthreads();
    all = {0, 0, -INF, 0};
    if (lane < WARPS) all = at.samples[lane];
    all.of_warp();
    const float seen = (float)(all.counts >> 16), usable = (float)(all.counts & 0xffff), mean = all.sum / usable;
    const float spread = sqrtf(fmaxf(all.square / usable - mean * mean, 0.0f));
    const float share = (float)k / (float)live * (seen / usable), upper = deviate(fminf(fmaxf(share, 0.0001f), 0.9999f));
    Pass pass = all_of_them();
    const float low = mean + (upper - (float)MARGIN) * spread;
    // Of few that are chosen the sample may have none.
    const float high = fmaxf(all.high, mean + (upper + (float)MARGIN) * spread), scale = BINS / (high - low);
    // Not so what is infinite, or no number, or all one value; or all that there is.
    if (share < 1 && high > low && high < INF && low > -INF && scale < INF)
        pass.linear = true, pass.low = low, pass.scale = scale;
    return pass;
}

#include "_stretch.cuh"

// Store in `at` the bin that holds the entry of rank k, where `over` entries are above all bins. -1 if that entry is
// below all bins; no counted entry is. `sent`: the counts of the other blocks have arrived.
__device__ __forceinline__ void find_bin(Shared& at, const Exchange& exchange, u32 k, u32 over, bool sent) {
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    // Entries from the last bin down to this thread's: of the row in the upper half, of this block in the lower.
    u64 mine = 0;
    u32 most = 0;
    const int b = BINS - 1 - (int)thread;
    if (b >= 0) {
        u32 total = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) {
            const u32 c = sent ? exchange.hists[r][b] : load_there(&at.hist[b], r);
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
    if (b == 0 && over + (u32)(with >> 32) < k) {
        at.bin = -1, at.most = 0, at.over = (u32)(with >> 32), at.sure = (u32)with;
        at.own = 0;
    }
    __syncthreads();
}

// Each block's entries in the threshold's bin and above it, from the counts that all blocks have sent. They determine
// how many scores are still to arrive.
__device__ __forceinline__ void read_counts(Shared& at, Exchange& exchange, int bin, bool equal) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (int r = 0; r < CLUSTER && !equal; r++) all += exchange.hists[r][bin];
        mbarrier_expect(&exchange.list, 4 * all);
    }
    if (warp < CLUSTER) {
        const u32* its = exchange.hists[warp];
        u32 above = 0;
        for (int b = bin + 1 + lane; b < BINS; b += 32) above += its[b];
        above = __reduce_add_sync(~0u, above);
        if (lane == 0) at.told[warp].sure = above, at.told[warp].listed = bin < 0 ? 0 : its[bin];
    }
}

// Write the ids of the `k` best of a row to `to`.
__device__ __forceinline__ void choose(Shared& at, Exchange& exchange, Stretch& scores, float* held, const Part& its,
                                       Pass pass, u32 k, int* to, const int* of, int block_size) {
    const u32 rank = cluster_rank(), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 lanes_before = (1u << lane) - 1;
    const int first = its.first_of(warp);
    u16* where = (u16*)(held + its.stretch * WARPS) + first;  // entry of the block's part that a score has come from
    held += first;

    int kept, bin;           // of the warp's stretch; that the threshold is in
    u32 over = 0, sure = 0;  // entries that are chosen for certain: of the row, of this block
    bool equal = false;      // all that the threshold's bin holds is one score
    float threshold = -INF;
    for (bool found = false, sends = true; !found;) {
        kept = scores.keep(pass.low, held, where, first);
        while (true) {
            for (int i = lane; i < kept; i += 32) {
                const int b = bin_of(pass, held[i]);
                if (b >= 0) atomicAdd(&at.hist[b], 1);
            }
            const bool is_async = sends;
            sends = false;
            if (is_async) {
                __syncthreads();
                cluster_wait();  // for the arrival in begin(): every block is there
                for (int i = thread; i < BINS / 4 * CLUSTER; i += THREADS) {
                    const int b = 4 * (i % (BINS / 4));
                    const float4 four = {__uint_as_float(at.hist[b]), __uint_as_float(at.hist[b + 1]),
                                         __uint_as_float(at.hist[b + 2]), __uint_as_float(at.hist[b + 3])};
                    store_async((float4*)&exchange.hists[rank][b], i / (BINS / 4), four, &exchange.counts);
                }
                mbarrier_wait(&exchange.counts);
            } else {
                cluster_sync();
            }
            find_bin(at, exchange, k, over, is_async);
            bin = at.bin;
            equal = !pass.linear && (bin < 0 || pass.shift == 0);
            found = equal || (bin >= 0 && at.most <= LIST);
            const bool narrower = !found && !pass.linear;
            if (found || narrower) over += at.over, sure += at.sure;
            if (found) {
                if (equal && bin >= 0) threshold = from_ordered(pass.first + bin);
                for (int i = lane; !equal && i < kept; i += 32) {
                    const float s = held[i];
                    if (bin_of(pass, s) == bin) {
                        const u32 slot = atomicAdd(&at.slot, 1);
                        for (int r = 0; r < CLUSTER; r++) {
                            if (is_async) {
                                store_async(&at.told[rank].list[slot], r, s, &exchange.list);
                            } else {
                                store_there(&at.told[rank].list[slot], r, s);
                            }
                        }
                    }
                }
                if (is_async) {
                    read_counts(at, exchange, bin, equal);
                } else if (thread < CLUSTER) {
                    store_there(&at.told[rank].sure, thread, sure);
                    store_there(&at.told[rank].listed, thread, at.own);
                }
            } else if (narrower) {
                pass.first += (u32)bin << pass.shift, pass.span = (1u << pass.shift) - 1;
                pass.shift = max(pass.shift - LOG_BINS, 0);
            }
            if (is_async && found) {
                mbarrier_wait(&exchange.list);
                __syncthreads();
                break;
            }
            cluster_sync();  // all have read, and know
            if (found) break;
            if (thread < BINS) at.hist[thread] = 0;
            __syncthreads();
            if (!narrower) break;
        }
        if (!found) pass = all_of_them(), scores.read_first();
    }

    const u32 taken = bin < 0 ? over : k;  // all that there is, or as many as are wanted
    if (!equal) {
        const u32 left = k - over;  // of those that are listed
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
    const u32 need = taken - over;  // ties that are taken
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

    // Count what each warp takes, then write.
    u32 warp_above = 0, warp_ties = 0;
    for (int i = lane; i < kept; i += 32) {
        const float s = held[i];
        warp_above += s > threshold, warp_ties += s == threshold;
    }
    warp_above = __reduce_add_sync(~0u, warp_above), warp_ties = __reduce_add_sync(~0u, warp_ties);
    if (lane == 0) at.warp_taken[warp] = warp_above | warp_ties << 16;
    __syncthreads();
    // The next kernel may come: what is left is short.
    release_kernels();
    u32 above = 0, ties = 0;
    for (int r = 0; r < rank; r++) above += at.above[r], ties += at.ties[r];
    for (int w = 0; w < warp; w++) above += at.warp_taken[w] & 0xffff, ties += at.warp_taken[w] >> 16;
    for (int i = lane; i - (int)lane < kept; i += 32) {
        const float s = i < kept ? held[i] : -INF;
        const bool over = s > threshold, tie = need && s == threshold;
        const u32 overs = __ballot_sync(~0u, over), tied = __ballot_sync(~0u, tie);
        const u32 my_ties = ties + __popc(tied & lanes_before);
        if (over || (tie && my_ties < need)) {
            int id = its.start + where[i];
            if (of) id = of[id / block_size] * block_size + id % block_size;
            to[above + __popc(overs & lanes_before) + min(my_ties, need)] = id;
        }
        above += __popc(overs), ties += __popc(tied);
    }
    if (rank == CLUSTER - 1)
        for (u32 i = taken + thread; i < k; i += THREADS) to[i] = -1;
}

// Before anything else.
__device__ __forceinline__ void begin(Shared& at, Exchange& exchange) {
    if (threadIdx.x < BINS) at.hist[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        at.slot = 0;
        mbarrier_init(&exchange.counts), mbarrier_init(&exchange.list);
        mbarrier_expect(&exchange.counts, 4 * BINS * CLUSTER);
    }
    cluster_arrive_relaxed();  // waited for before anything is told
    wait_for_kernels();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    topk_select_cluster_kernel(const float* scores, i64 scores_batch, i64 scores_head, const int* blocks,
                               i64 blocks_batch, i64 blocks_head, int* out, i64 out_batch, i64 out_head,
                               const int* rows, i64 heads, i64 n, i64 tokens, i64 k, i64 block_size) {
    DYNAMIC_SHARED(held);
    __shared__ Exchange exchange;
    __shared__ Shared at;
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int warp = threadIdx.x / 32;
    const float* row = scores + i_batch * scores_batch + i_head * scores_head;
    begin(at, exchange);
    // Neither waits for the other: of the sample it is asked later what lies within the row.
    const int sealed = rows ? rows[2 * i_batch + 1] : 0;
    int place;
    const float4 four = read_sample(row, (int)n, place);
    const Part its(rows ? min((int)n, (sealed + (int)tokens - 1) / (int)tokens) : (int)n);
    const int first = its.first_of(warp);
    Stretch mine(row + its.start + first, min(its.stretch, its.count - first));
    mine.read_first();
    const Pass pass = guess(at, four, place, its.live, (u32)k);
    choose(at, exchange, mine, held, its, pass, (u32)k, out + i_batch * out_batch + i_head * out_head,
           blocks ? blocks + i_batch * blocks_batch + i_head * blocks_head : nullptr, (int)block_size);
}
