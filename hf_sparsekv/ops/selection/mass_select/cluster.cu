// Selection by estimated attention mass, by clusters of thread blocks (Hopper and later).
//
// A cluster has one row and KV head, each of its blocks a part of the row, each warp a stretch of that.
// 1. Every block adds up what the blocks of token_score/labels.cu have added up on their way, so each knows the mass of
//    the whole row.
// 2. A token's share becomes a bin, one byte in shared memory. Blocks tell each other how many tokens are in each bin.
// 3. Every block finds the last bin that is taken, and knows how many tokens the blocks before it take. Its warps write
//    the ids of theirs, ascending. Entries after the last id are not written.
//
// Blocks exchange results by asynchronous writes (st.async), as in topk_select/cluster.cu.

#include "_mass.cuh"

#define WARPS (THREADS / 32)
#define NONE 255  // bin of tokens that cannot be selected; the others are below
#define BINS 256
#define STEPS 8  // bins an octave
#define TILE 128  // tokens of a warp at once, four of a lane
#define MASS_ONE (1 << 30)
#define LENGTHS 32
#define SUMS 3  // of a part: stored tokens, recent ones, what labels leave out

static_assert(BINS % (32 * 4) == 0, "a lane of the warp that looks for the cut has whole words of bins");

struct Shared {
    __align__(16) u32 hists[CLUSTER][BINS];  // of each block
    __align__(16) u32 hist[BINS];
    Sum sums[SUMS * GROUP];
    float offset[GROUP];  // from a token's label mass to its share
    u64 hists_there;
    u32 warp_taken[WARPS][2];  // above the cut, and in it
    int cut;
    u32 need, above, ties;  // tokens of the cut that are taken; taken by blocks before this one: above it, in it
};

// A warp's stretch of all heads' scores.
struct Stretch {
    const float* from;  // a lane's first four entries, of the first head
    i64 head;
    int length;  // of the warp's

    __device__ __forceinline__ void read(float4 (&four)[GROUP], int tile) const {
        const float* next = from + tile;
        const int left = length - tile - 4 * (int)(threadIdx.x % 32);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            four[g] = {-INF, -INF, -INF, -INF};
            if (left >= 4) {
                four[g] = *(const float4*)(next + g * head);
            } else {
                if (left > 0) four[g].x = next[g * head];
                if (left > 1) four[g].y = next[g * head + 1];
                if (left > 2) four[g].z = next[g * head + 2];
            }
        }
    }
};

// The warp that looks for the cut: lane i has the bins from 255 - 8 i down, so that sums up to a lane are those of all
// larger bins, which hold smaller shares.
__device__ __forceinline__ void find_cut(Shared& at, float left, u32 least, u32 most, int* count, float* mass, int* cut,
                                         u64* totals, bool counts) {
    constexpr int MINE = BINS / 32;
    const int lane = threadIdx.x % 32;
    const u32 rank = cluster_rank();
    u32 total[MINE], earlier[MINE], here = 0;
    float each[MINE], held = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = BINS - 1 - (MINE * lane + i);
        total[i] = earlier[i] = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) {
            const u32 its = b == NONE ? 0 : at.hists[r][b];
            total[i] += its;
            if (r < rank) earlier[i] += its;
        }
        each[i] = exp2f((b + 0.5f) / -STEPS);
        here += total[i], held += total[i] * each[i];
    }
    const u32 with = sum_to_here(here);
    float mass_with = held;
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(~0u, mass_with, d);
        if (lane >= d) mass_with += other;
    }
    const u32 live = __shfl_sync(~0u, with, 31);
    float mass_before = __shfl_up_sync(~0u, mass_with, 1);
    if (lane == 0) mass_before = 0;
    // From each bin on: tokens after it, and the mass from it on.
    u32 after[MINE], enough = 0;
    u32 tokens = with - here;
    float from = mass_before;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        after[i] = tokens, tokens += total[i];
        from += total[i] * each[i];
        if (from > left) enough += total[i];
    }
    enough = __reduce_add_sync(~0u, enough);
    const u32 taken = min(min(max(enough, least), most), live);
    u32 below = 0;  // bins whose tokens, and all of larger shares, are too few
#pragma unroll
    for (int i = 0; i < MINE; i++) below += live - after[i] < taken;
    const int last = taken ? (int)__reduce_add_sync(~0u, below) : -1;
    u32 before = 0, above = 0, ties = 0, at_cut = 0;
    float rest = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = BINS - 1 - (MINE * lane + i);
        if (b < last) before += total[i], above += earlier[i];
        if (b == last) ties = earlier[i], at_cut = total[i];
        if (b > last) rest += total[i] * each[i];
    }
    before = __reduce_add_sync(~0u, before), above = __reduce_add_sync(~0u, above);
    ties = __reduce_add_sync(~0u, ties), at_cut = __reduce_add_sync(~0u, at_cut);
    for (int d = 16; d; d /= 2) rest += __shfl_xor_sync(~0u, rest, d);
    if (lane) return;
    at.cut = last, at.need = taken - before, at.above = above, at.ties = ties;
    if (rank) return;
    if (last >= 0) rest += (at_cut - (taken - before)) * exp2f((last + 0.5f) / -STEPS);
    const float share = fminf(fmaxf(1 - rest, 0.0f), 1.0f);
    *count = (int)taken, *mass = share, *cut = last;
    if (!totals || !counts) return;
    const u64 gap = (u64)((1 - share) * MASS_ONE);
    int length = 0;
    for (int i = 0; i < LENGTHS; i++) length += taken > 1ull << i;
    atomicAdd(totals, 1), atomicAdd(totals + 1, taken), atomicAdd(totals + 2, taken < min(enough, live));
    atomicAdd(totals + 3, MASS_ONE - gap), atomicMax(totals + 4, gap);
    atomicAdd(totals + 5 + min(length, LENGTHS - 1), 1);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    mass_select_cluster_kernel(const float* scores, i64 scores_batch, i64 scores_head, const Sum* parts, i64 n_parts,
                              const int* rows, const int* kept, const void* sink_logits, int* ids, i64 ids_batch, i64 ids_head, u32* bins,
                              i64 bins_batch, i64 bins_head, int* count, float* mass, int* cut, u64* totals, i64 heads,
                              i64 n, i64 ring, i64 scale_bits, i64 left_bits, i64 least, i64 most) {
    DYNAMIC_SHARED(dynamic);
    __shared__ Shared at;
    u32* held = (u32*)dynamic;  // bins of the block's tokens, four in a word
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads, i_list = blockIdx.y;
    const u32 rank = cluster_rank();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        mbarrier_init(&at.hists_there);
        mbarrier_expect(&at.hists_there, 4 * BINS * CLUSTER);
    }
    cluster_arrive_relaxed();  // waited for before anything is told
    for (int i = thread; i < BINS; i += THREADS) at.hist[i] = 0;
    wait_for_kernels();
    const float factor = __uint_as_float((u32)scale_bits) * LOG2E, largest = HIGHEST / factor;
    const int tokens = rows[2 * i_batch], sealed = rows[2 * i_batch + 1], live = min((int)n, sealed);
    const int length = kept ? min(tokens, kept[i_batch]) : tokens;  // those whose keys are there
    // All warps but the last ones have as many tokens.
    const int stretch = (live + CLUSTER * WARPS * TILE - 1) / (CLUSTER * WARPS * TILE) * TILE;
    const int first = min(((int)rank * WARPS + warp) * stretch, live);
    const float* row = scores + i_batch * scores_batch + i_head * GROUP * scores_head;
    const Stretch its = {row + first + 4 * lane, scores_head, min(stretch, live - first)};
    float4 four[GROUP], next[GROUP];
    its.read(next, 0);

    // 1. Sums.
    for (int i = warp; i < SUMS * GROUP; i += WARPS) {
        const Sum* part = parts + i_list * n_parts * SUMS * GROUP + i;
        Sum all = {-INF, 0};
#pragma unroll 4
        for (int p = lane; p < (int)n_parts; p += 32) all.add(part[p * SUMS * GROUP]);
        all.of_lanes();
        if (lane == 0) at.sums[i] = all;
    }
    __syncthreads();
    if (thread < GROUP) {
        const Sum* sums = at.sums + SUMS * thread;
        Sum close = sums[1];
        if (sink_logits) {  // a learned one is mass without a token
            const i64 i = i_head * GROUP + thread;
            close.add((SINK_BYTES == 4 ? ((const float*)sink_logits)[i] : unpack(((const u16*)sink_logits)[i])) * LOG2E);
        }
        const int recent_tokens = length > 0 ? max(min(length - sealed, (int)ring), 1) : 1;
        float log_near = close.log(), mean = sums[2].log() - log2f((float)recent_tokens);
        // What is no number counts as no mass, or as no correction, so that the other heads are not affected.
        if (!is_finite(log_near)) log_near = -INF;
        if (!is_finite(mean)) mean = 0;
        const float log_stored = mean + sums[0].log();
        const float top = fmaxf(log_near, log_stored), base = top == -INF ? 0 : top;
        const float sum = exp2f(log_near - base) + exp2f(log_stored - base);
        at.offset[thread] = mean - (base + log2f(sum));
    }
    __syncthreads();

    // 2. Bins.
    float offset[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) offset[g] = at.offset[g];
    held += warp * (stretch / 4) + lane;
    for (int tile = 0; tile < its.length; tile += TILE) {
#pragma unroll
        for (int g = 0; g < GROUP; g++) four[g] = next[g];
        its.read(next, tile + TILE);
        u32 word = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float share = -INF;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float score = c == 0 ? four[g].x : c == 1 ? four[g].y : c == 2 ? four[g].z : four[g].w;
                share = fmaxf(share, bounded(score, largest) * factor + offset[g]);  // leaves out what is no number
            }
            int bin = NONE;
            if (is_finite(share)) {
                bin = (int)fminf(fmaxf(floorf(share * -STEPS), 0.0f), NONE - 1.0f);
                atomicAdd(&at.hist[bin], 1);
            }
            word |= (u32)bin << 8 * c;
        }
        held[tile / 4] = word;
    }
    __syncthreads();
    cluster_wait();  // every block is there
    for (int i = thread; i < BINS / 4 * CLUSTER; i += THREADS) {
        const int b = 4 * (i % (BINS / 4));
        const float4 some = {__uint_as_float(at.hist[b]), __uint_as_float(at.hist[b + 1]),
                             __uint_as_float(at.hist[b + 2]), __uint_as_float(at.hist[b + 3])};
        store_async((float4*)&at.hists[rank][b], i / (BINS / 4), some, &at.hists_there);
    }
    mbarrier_wait(&at.hists_there);

    // 3. Ids.
    if (warp == 0)
        find_cut(at, __uint_as_float((u32)left_bits), (u32)least, (u32)most, count + i_list, mass + i_list, cut + i_list,
                 totals, tokens > 0);
    __syncthreads();
    release_kernels();
    const int last = at.cut;
    const auto mark = [&](u32 word) {  // tokens above the cut in the lower half, in it in the upper one
        u32 found = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int bin = word >> 8 * c & 255;
            found += (bin < last) + ((u32)(bin == last) << 16);
        }
        return found;
    };
    u32 mine_above = 0, mine_ties = 0;
    for (int tile = 0; tile < its.length; tile += TILE) {
        const u32 found = mark(held[tile / 4]);
        mine_above += found & 0xffff, mine_ties += found >> 16;
    }
    mine_above = __reduce_add_sync(~0u, mine_above), mine_ties = __reduce_add_sync(~0u, mine_ties);
    if (lane == 0) at.warp_taken[warp][0] = mine_above, at.warp_taken[warp][1] = mine_ties;
    __syncthreads();
    u32 above = at.above, ties = at.ties;
    for (int w = 0; w < warp; w++) above += at.warp_taken[w][0], ties += at.warp_taken[w][1];
    const u32 need = at.need;
    int* to = ids + i_batch * ids_batch + i_head * ids_head;
    for (int tile = 0; tile < its.length; tile += TILE) {
        const u32 word = held[tile / 4], found = mark(word), with = sum_to_here(found), all = __shfl_sync(~0u, with, 31);
        u32 my_above = above + ((with - found) & 0xffff), my_ties = ties + ((with - found) >> 16);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int bin = word >> 8 * c & 255;
            const bool over = bin < last, tie = bin == last;
            if (over || (tie && my_ties < need)) to[my_above + min(my_ties, need)] = first + tile + 4 * lane + c;
            my_above += over, my_ties += tie;
        }
        above += all & 0xffff, ties += all >> 16;
    }
    if (bins) {
        u32* its_bins = bins + i_batch * bins_batch + i_head * bins_head;
        for (int tile = 4 * lane; tile < its.length; tile += TILE) its_bins[(first + tile) / 4] = held[tile / 4 - lane];
    }
}
