// Selection from long rows by clusters of thread blocks, which hold a row in their shared memory (Hopper and later).
//
// Each of CLUSTER blocks holds a part of one row, and each warp a stretch of that.
// 1. Mean and deviation of a quarter of the scores give a number that more than k of them reach, but not many more.
//    What reaches it moves to the front of each warp's stretch.
// 2. Together the blocks count these by bins, up to the largest score. The bin that holds the score of rank k has few.
// 3. Every block is handed these few, and finds the threshold among them by itself. As it then knows how many entries
//    each block takes, it writes its ids to their place, ascending.
//
// The guess never shows in the result: where too few reach it, or too many are in the bin, the row is read again, and
// its scores are counted by their bits, LOG_BINS a pass.
//
// Blocks hand over what they know by writing to one another's shared memory ("Distributed Shared Memory", CUDA C++
// Programming Guide), asynchronously (st.async). Only further passes, which hardly a row needs, meet at barriers of
// the cluster: these fence all of the GPU's memory.

#define BINS (1 << LOG_BINS)
#define WARPS (THREADS / 32)

static_assert(BINS <= THREADS, "a thread has a bin");
static_assert(WARPS >= CLUSTER, "a warp counts what a block takes");

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
    if (pass.linear) return s >= pass.low ? (int)fminf((s - pass.low) * pass.scale, BINS - 1) : -1;  // no int holds 1e30
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

struct Exchange {
    u64 met, counts, list;
    __align__(16) u32 hists[CLUSTER][BINS];  // of each block
};

// A row of `live` entries and this block's part of it. All warps but the last ones have as many, a multiple of 32.
struct Part {
    int live, stretch, start, count;

    __device__ __forceinline__ Part(int entries) : live(entries) {
        stretch = (live + CLUSTER * WARPS * 32 - 1) / (CLUSTER * WARPS * 32) * 32;
        start = min((int)cluster_rank() * stretch * WARPS, live), count = min(stretch * WARPS, live - start);
    }
};

// Tell all blocks what this one's scores have in common, and take from all of them a pass, and how many can be chosen.
__device__ __forceinline__ void guess(Shared& at, Exchange& exchange, Met& met, u32 k, Pass& pass) {
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
        store_async(&mine->met.sum, thread, met.sum, &exchange.met);
        store_async(&mine->met.square, thread, met.square, &exchange.met);
        store_async(&mine->met.high, thread, met.high, &exchange.met);
        store_async(&mine->met.sampled, thread, met.sampled, &exchange.met);
        store_async(&mine->met.usable, thread, met.usable, &exchange.met);
    }
    mbarrier_wait(&exchange.met);
    met = at.told[0].met;
    for (int r = 1; r < CLUSTER; r++) met.add(at.told[r].met);
    const float mean = met.sum / met.sampled, share = fminf(fmaxf((float)k / met.usable, 0.0001f), 0.9999f);
    const float spread = sqrtf(fmaxf(met.square / met.sampled - mean * mean, 0.0f));
    pass.low = mean + (deviate(share) - (float)MARGIN) * spread;
    pass.scale = BINS / (met.high - pass.low);
    pass.first = 0, pass.span = ~0u, pass.shift = 32 - LOG_BINS;
    // Not so what is infinite, or no number, or all one value.
    pass.linear = met.high > pass.low && met.high < INF && pass.low > -INF && pass.scale < INF;
}

// Leave in `at` which bin holds the entry of rank k, `over` of which lie above all bins. `sent`: blocks' counts are here.
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
    __syncthreads();
}

// What each block has in the threshold's bin and above it, from the counts that all have sent; so it is known how many
// scores are still on their way.
__device__ __forceinline__ void read_counts(Shared& at, Exchange& exchange, int bin, bool equal) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (int r = 0; r < CLUSTER; r++) all += exchange.hists[r][bin];
        mbarrier_expect(&exchange.list, equal ? 0 : 4 * all);
    }
    if (warp < CLUSTER) {
        const u32* its = exchange.hists[warp];
        u32 above = 0;
        for (int b = bin + 1 + lane; b < BINS; b += 32) above += its[b];
        above = __reduce_add_sync(~0u, above);
        if (lane == 0) at.told[warp].sure = above, at.told[warp].listed = its[bin];
    }
}

// Write the ids of the `k` best of a row to `to`. `fill(held, first, length)` gives a warp its stretch of the scores,
// entries `first ..` of the block's part, and what they have in common.
template <class Fill>
__device__ __forceinline__ void choose(Exchange& exchange, float* held, const Part& its, u32 k, const Fill& fill,
                                       int* to, const int* of, int block_size) {
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
    bool first_pass = true;
    Pass pass;
    if (thread < BINS) at.hist[thread] = 0;
    if (thread == 0) at.slot = 0, at.bin = BINS;
    for (bool again = false, found = false; !found; again = true) {
        Met met = fill(held + first, first, length);
        if (!again) {
            guess(at, exchange, met, k, pass);
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
            const bool is_async = first_pass;
            first_pass = false;
            if (is_async) {
                __syncthreads();
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
            const u32 bin = at.bin;
            if (!pass.linear && bin == BINS) __trap();  // scores have changed since they were counted, or k is 0
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
                    read_counts(at, exchange, (int)bin, equal);
                } else if (thread < CLUSTER) {
                    store_there(&at.told[rank].sure, thread, sure);
                    store_there(&at.told[rank].listed, thread, at.own);
                }
            } else if (narrower) {
                pass.first += bin << pass.shift, pass.span = (1u << pass.shift) - 1;
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
    release_kernels();
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
__device__ __forceinline__ void begin(Exchange& exchange) {
    if (threadIdx.x == 0) {
        mbarrier_init(&exchange.met), mbarrier_init(&exchange.counts), mbarrier_init(&exchange.list);
        mbarrier_expect(&exchange.met, 4 * 5 * CLUSTER);
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
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int lane = threadIdx.x % 32;
    __shared__ Exchange exchange;
    begin(exchange);
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
    choose(exchange, held, its, (u32)k, fill, out + i_batch * out_batch + i_head * out_head,
           blocks ? blocks + i_batch * blocks_batch + i_head * blocks_head : nullptr, (int)block_size);
}
