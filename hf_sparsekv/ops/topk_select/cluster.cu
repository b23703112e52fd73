// Selection from long rows by clusters of thread blocks, which hold a row in their shared memory (Hopper and later).
//
// Each of CLUSTER blocks holds a part of one row.
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
// Programming Guide): three barriers of a cluster, and two more for each further pass.

#define INF __int_as_float(0x7f800000)
#define BINS (1 << LOG_BINS)
#define WARPS (THREADS / 32)
#define EACH 4  // of so many neighbouring scores one is of the sample

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

struct Told {  // by a block to all of its cluster
    float sum, square, high;
    u32 sampled, usable;
    u32 listed, sure;  // entries of the threshold's bin, and of those above it
    float list[LIST];
};

struct Shared {
    Told told[CLUSTER];
    u32 hist[BINS];
    u64 warp_counts[WARPS];
    float warp_sum[WARPS], warp_square[WARPS], warp_high[WARPS];
    u32 warp_sampled[WARPS], warp_usable[WARPS], warp_taken[WARPS];
    u32 above[CLUSTER], ties[CLUSTER];
    u32 slot, bin, most, over, sure, own;  // what the thread found that has the threshold's bin
    float threshold;
    u32 taken_over;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    topk_select_cluster_kernel(const float* scores, i64 scores_batch, i64 scores_head, const int* blocks,
                               i64 blocks_batch, i64 blocks_head, int* out, i64 out_batch, i64 out_head,
                               const int* rows, i64 heads, i64 n, i64 tokens, i64 k_best, i64 block_size) {
    extern __shared__ float held[];
    __shared__ Shared at;
    const u32 rank = cluster_rank(), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 lanes_before = (1u << lane) - 1;
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const u32 k = (u32)k_best;
    cluster_arrive();  // waited for before anything is told: a block may not have begun
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // The row's entries, this block's, and this warp's: all but the last have as many, and each begins at a multiple
    // of 32.
    int live = (int)n;
    if (rows) live = min(live, (rows[2 * i_batch + 1] + (int)tokens - 1) / (int)tokens);
    const int stretch = (live + CLUSTER * WARPS * 32 - 1) / (CLUSTER * WARPS * 32) * 32, part = stretch * WARPS;
    const int start = min((int)rank * part, live), count = min(part, live - start);
    const int first = min((int)warp * stretch, count), length = min(stretch, count - first);
    const float* row = scores + i_batch * scores_batch + i_head * scores_head + start;
    u16* where = (u16*)(held + part);  // entry of the row's part that a score has come from

    float sum = 0, square = 0, high = -INF;
    u32 sampled = 0, usable = 0;
    auto hold = [&](float s) {
        s = s == s ? s : -INF;
        usable += s != -INF;
        return s;
    };
    auto sample = [&](float s) {
        if (s != -INF) sampled++, sum += s, square += s * s, high = fmaxf(high, s);
    };
    const int whole = ((u64)row & 15) ? 0 : count & ~3;
#pragma unroll 4
    for (int i = 4 * thread; i < whole; i += 4 * THREADS) {
        float4 four = *(const float4*)(row + i);
        four.x = hold(four.x), four.y = hold(four.y), four.z = hold(four.z), four.w = hold(four.w);
        *(float4*)(held + i) = four;
        sample(four.x);
    }
    for (int i = whole + thread; i < count; i += THREADS) {
        held[i] = hold(row[i]);
        if (i % EACH == 0) sample(held[i]);
    }
    if (thread < BINS) at.hist[thread] = 0;
    if (thread == 0) at.slot = 0, at.bin = BINS;
    for (int d = 16; d; d /= 2) {
        sum += __shfl_xor_sync(~0u, sum, d), square += __shfl_xor_sync(~0u, square, d);
        high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
    }
    sampled = __reduce_add_sync(~0u, sampled), usable = __reduce_add_sync(~0u, usable);
    if (lane == 0) {
        at.warp_sum[warp] = sum, at.warp_square[warp] = square, at.warp_high[warp] = high;
        at.warp_sampled[warp] = sampled, at.warp_usable[warp] = usable;
    }
    __syncthreads();
    cluster_wait();
    if (thread < CLUSTER) {  // one thread tells one block
        sum = square = 0, high = -INF, sampled = usable = 0;
        for (int w = 0; w < WARPS; w++) {
            sum += at.warp_sum[w], square += at.warp_square[w], high = fmaxf(high, at.warp_high[w]);
            sampled += at.warp_sampled[w], usable += at.warp_usable[w];
        }
        Told* mine = &at.told[rank];
        store_there(there(&mine->sum, thread), __float_as_uint(sum));
        store_there(there(&mine->square, thread), __float_as_uint(square));
        store_there(there(&mine->high, thread), __float_as_uint(high));
        store_there(there(&mine->sampled, thread), sampled);
        store_there(there(&mine->usable, thread), usable);
    }
    cluster_sync();
    sum = square = 0, high = -INF, sampled = usable = 0;
    for (int r = 0; r < CLUSTER; r++) {
        sum += at.told[r].sum, square += at.told[r].square, high = fmaxf(high, at.told[r].high);
        sampled += at.told[r].sampled, usable += at.told[r].usable;
    }

    int kept = length;   // of the warp's stretch
    bool moved = false;  // and whether they are where they were
    u32 need = 0;        // ties that are taken
    float threshold = -INF;
    if (usable > k) {
        const float mean = sum / sampled, spread = sqrtf(fmaxf(square / sampled - mean * mean, 0.0f));
        Pass pass;
        pass.low = mean + (deviate(fminf(fmaxf((float)k / usable, 0.0001f), 0.9999f)) - MARGIN) * spread;
        pass.scale = BINS / (high - pass.low);
        pass.first = 0, pass.span = ~0u, pass.shift = 32 - LOG_BINS;
        // Not so what is infinite, or no number, or all one value.
        pass.linear = high > pass.low && high < INF && pass.low > -INF && pass.scale < INF;
        if (pass.linear) {
            moved = true, kept = 0;
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
        u32 over = 0, sure = 0;  // entries that are taken for certain: of the row, of this block
        bool equal = false;      // all that the bin holds is one score
        while (true) {
            for (int i = lane; i < kept; i += 32) {
                const int b = bin_of(pass, held[first + i]);
                if (b >= 0) atomicAdd(&at.hist[b], 1);
            }
            cluster_sync();
            // Entries of the bins from the last one to this thread's: of the row in the upper half, of this block in
            // the lower.
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
            const u32 bin = at.bin;
            equal = !pass.linear && pass.shift == 0;
            if (bin < BINS && (equal || at.most <= LIST)) {
                over += at.over, sure += at.sure;
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
                cluster_sync();
                break;
            }
            if (pass.linear) {  // by their bits then, all of them
                pass.linear = moved = false, kept = length;
                for (int i = lane; i < length; i += 32) {
                    const float s = row[first + i];
                    held[first + i] = s == s ? s : -INF;
                }
            } else {
                over += at.over, sure += at.sure;
                pass.first += bin << pass.shift, pass.span = (1u << pass.shift) - 1;
                pass.shift = max(pass.shift - LOG_BINS, 0);
            }
            cluster_sync();  // all have read
            if (thread < BINS) at.hist[thread] = 0;
            if (thread == 0) at.bin = BINS;
            __syncthreads();
        }
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
            const Told& its = at.told[warp];
            u32 above = 0, ties = 0;
            if (equal) {
                ties = its.listed;
            } else {
                for (u32 i = lane; i < its.listed; i += 32) {
                    above += its.list[i] > threshold, ties += its.list[i] == threshold;
                }
                above = __reduce_add_sync(~0u, above), ties = __reduce_add_sync(~0u, ties);
            }
            if (lane == 0) at.above[warp] = its.sure + above, at.ties[warp] = ties;
        }
    } else if (thread < CLUSTER) {
        at.above[thread] = at.told[thread].usable, at.ties[thread] = 0;
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
    int* to = out + i_batch * out_batch + i_head * out_head;
    const int* of = blocks ? blocks + i_batch * blocks_batch + i_head * blocks_head : nullptr;
    for (int i = lane; i - (int)lane < kept; i += 32) {
        const float s = i < kept ? held[first + i] : -INF;
        const bool over = s > threshold, tie = need && s == threshold;
        const u32 overs = __ballot_sync(~0u, over), tied = __ballot_sync(~0u, tie);
        const u32 my_ties = ties + __popc(tied & lanes_before);
        if (over || (tie && my_ties < need)) {
            int id = start + (moved ? (int)where[first + i] : first + i);
            if (of) id = of[id / (int)block_size] * (int)block_size + id % (int)block_size;
            to[above + __popc(overs & lanes_before) + min(my_ties, need)] = id;
        }
        above += __popc(overs), ties += __popc(tied);
    }
    if (rank == CLUSTER - 1)
        for (u32 i = min(usable, k) + thread; i < k; i += THREADS) to[i] = -1;
}
