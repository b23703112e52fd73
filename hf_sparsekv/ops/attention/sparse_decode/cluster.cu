// Attention of one query over chosen tokens by clusters of thread blocks (Hopper and later).
//
// A cluster has one row and KV head. Stored tokens, the recent buffer and the means form one list, and its warps take
// tiles of 16 entries in turn. Until its last tile a warp needs no other warp. Its lanes look up addresses of tokens,
// keys and values go from memory straight to the registers of the tensor cores, and each warp has a separate softmax.
// Then a block adds up its warps, and each block of the cluster adds up a part of all results, which the other blocks
// have sent to its shared memory. One launch thus does the work of a split and a merge.
//
// Channels are in another order in these products, the same on both sides, so that each load takes 16 bytes.
//
// With CODES `kv` has codes of 8 bits, and all else 16 bits. Of the 32 entries that a warp's lanes have looked up it
// takes first those in codes, all at once, as many bytes as of 16 others; then the others. Codes of keys become numbers
// of 16 bits, by the centres and steps of their block. Codes of values are whole numbers, exact in 16 bits: a value's
// scale multiplies its weight.

#define WARPS (THREADS / 32)
#define STEPS (DIM / 32)    // of a key: 32 channels, eight of them in 16 bytes of a thread
#define HALVES (DIM / 64)   // of a value: 64 channels, eight of them in 16 bytes of a thread
#define SIZE (GROUP * DIM)  // numbers of the result
#define SLICE (SIZE / CLUSTER)
#define LOG2E 1.4426950408889634f
#define AHEAD 4  // chosen tokens that a thread reads at once, to count them
#if CODES
typedef signed char Stored;
#define WIDE (DIM / 64)  // of a key in codes: 64 channels, 16 of them in 16 bytes of a thread
#else
typedef u16 Stored;
#endif

static_assert(GROUP <= 8, "heads are the eight columns of a product");
static_assert(SIZE % (4 * CLUSTER) == 0, "each block has as much of the result");

__device__ __forceinline__ float base_of(float most) {  // nothing attended yet: -inf - -inf is no number
    return most == -INF ? 0 : most;
}

// What a row and KV head attend to. Distances are in numbers.
struct Lists {
    const Stored* kv;
    const u16 *pages, *recent, *means;
    int kv_block, kv_token, page, page_token, recent_token, means_block;
    const int *ids, *table;
    const u32* chosen;  // how many tokens of each span are, if there are means
    int n, near, spans, all, sealed, sinks, ring, span;
    float factor;  // of logits, to base 2
#if CODES
    const u32* scales;  // of a block, 16 bits each: centres and steps of its key's channels, scales of its values
    int scales_block;
#endif
};

// Where an entry of the list is: a block or page, or -1, and a place there.
struct Place {
    int page, in;
};

// Look up entry `e`. For a chosen token `id` is its entry of `ids`, read beforehand so that nothing waits here.
__device__ __forceinline__ Place look_up(const Lists& its, int e, int id) {
    if (e < its.n) {
        const int in = id & ((1 << LOG_BLOCK) - 1);
        if (PAGED) return {its.sealed > 0 ? id >> LOG_BLOCK : -1, in};
        return {id >= 0 && id < its.sealed ? its.table[id >> LOG_BLOCK] : -1, in};
    }
    e -= its.n;
    if (e < its.near) {  // as find_recent of _paged.py
        int entry = e;
        if (e >= its.sinks) entry += its.sealed % its.ring;
        if (entry >= its.sinks + its.ring) entry -= its.ring;
        return {e >= its.sinks || e < its.sealed ? 0 : -1, entry};
    }
    e -= its.near;
    if (e < its.spans) return {its.table[(min((e + 1) * its.span, its.sealed) - 1) >> LOG_BLOCK], e};
    return {-1, 0};
}

// An entry: where its key begins, or null; what is added to its logits, to base 2; and whether it is a token, and one
// that `kv` holds.
struct Entry {
    const void* at;
    float bias;
    bool counts, far;
#if CODES
    const u32* scales;  // of the block of one that `kv` holds
    int in;             // its place there
#endif
};

__device__ __forceinline__ Entry settle(const Lists& its, int e, const Place& place) {
    Entry entry = {nullptr, 0, false, false};
    if (e < its.n) {
        entry.counts = place.page != -1;
        entry.far = PAGED ? place.page < -1 : entry.counts;
        if (entry.far) {
            const i64 block = PAGED ? -(place.page + 2) : place.page;
            entry.at = its.kv + block * its.kv_block + place.in * its.kv_token;
#if CODES
            entry.scales = its.scales + block * its.scales_block, entry.in = place.in;
#endif
        } else if (entry.counts) {
            entry.at = its.pages + (i64)place.page * its.page + place.in * its.page_token;
        }
    } else if (e < its.n + its.near) {
        entry.counts = place.page >= 0;
        if (entry.counts) entry.at = its.recent + place.in * its.recent_token;
    } else if (place.page >= 0) {
        const int first = place.in * its.span, end = min(first + its.span, its.sealed);
        const int unread = end - max(first, its.sinks) - (int)its.chosen[place.in];
        if (unread > 0) entry.at = its.means + (i64)place.page * its.means_block, entry.bias = log2f((float)unread);
    }
    return entry;
}

#include "_entries.cuh"

// Of a block in the result of a row and KV head; what each block is told by all.
struct Share {
    float4 sum[SLICE / 4];
    float most[GROUP], total[GROUP];
    u32 tokens, far;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    sparse_decode_cluster_kernel(const u16* q, i64 q_batch, i64 q_head, const Stored* kv, i64 kv_block, i64 kv_head,
                                i64 kv_token, const u16* pages, i64 page, i64 page_token, const u16* recent,
                                i64 recent_batch, i64 recent_head, i64 recent_token, const int* rows,
                                const int* table, i64 table_row, const int* ids, i64 ids_batch, i64 ids_head,
                                const u16* means, i64 means_block, i64 means_head, const int* columns, i64 columns_batch, i64 columns_head, u16* out,
                                i64 out_batch, i64 out_head, float* lse, i64 lse_batch, i64 lse_head, i64* attended,
                                i64 attended_batch, i64 attended_head, i64* from_host, i64 host_batch, i64 host_head,
                                const void* sink_logits, i64 heads, i64 n, i64 sinks, i64 end, i64 span, i64 most_spans,
                                i64 scale_bits
#if CODES
                                ,
                                const u32* scales, i64 scales_block, i64 scales_head
#endif
    ) {
    DYNAMIC_SHARED(held);  // how many tokens of each span are chosen, then each warp's result
    __shared__ Share at[CLUSTER];
    __shared__ u64 mbarrier;
    __shared__ Lists lists;
    __shared__ Entries entries[WARPS];
    __shared__ uint4 query[STEPS][32];  // of each thread of a warp: of head `row`, zeros where there is none
#if CODES
    __shared__ uint4 wide_query[2 * WIDE][32];  // as take_codes() takes it
#endif
    __shared__ float most[WARPS][8], total[WARPS][8];
    __shared__ u32 tokens[WARPS], far[WARPS];
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int rank = cluster_rank();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
    // Of each block a slice, maxima and sums; the first one counts tokens.
    if (thread == 0) {
        mbarrier_init(&mbarrier);
        mbarrier_expect(&mbarrier, 4 * CLUSTER * (SLICE + 2 * GROUP + (rank == 0 ? 2 : 0)));
    }
    cluster_arrive_relaxed();  // waited for before anything is sent
    u32* chosen = (u32*)held;
    for (int i = thread; i < most_spans; i += THREADS) chosen[i] = 0;
    for (int j = warp; j < STEPS && row >= GROUP; j += WARPS) query[j][lane] = uint4{0, 0, 0, 0};
    // Spans by a product, as a division takes as long as a load: exact below two million blocks.
    const float spans_a_block = 1.0f / (float)((int)span >> LOG_BLOCK);
    const auto span_of = [&](int token) { return (int)(((float)(token >> LOG_BLOCK) + 0.5f) * spans_a_block); };
    __syncthreads();
    wait_for_kernels();

    // Keys are three waits for memory away: for ids, the table, themselves. All else comes meanwhile.
    const int given = (int)n, apart = CLUSTER * WARPS;
    const int* listed = ids + i_batch * ids_batch + i_head * ids_head;
    const int* tokens_of = columns ? columns + i_batch * columns_batch + i_head * columns_head : listed;
    // A warp's tiles: `tile`, `tile + apart` .. Its lanes look up two at once, meanwhile the next two, and read the ids
    // of the two after these.
    int tile = rank * WARPS + warp;
    const auto entry_of = [&](int tile) { return 16 * (tile + apart * (lane / 16)) + lane % 16; };
    const auto id_of = [&](int e) { return e < given ? listed[e] : -1; };
    const int length = rows[2 * i_batch], sealed = rows[2 * i_batch + 1];
    const int id = id_of(entry_of(tile));
    int next_id = id_of(entry_of(tile + 2 * apart));
    int token[AHEAD];  // of the chosen ones, to be counted
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        const int i = thread + t * THREADS;
        token[t] = means && i < given ? tokens_of[i] : -1;
    }
    for (int j = warp; j < STEPS; j += WARPS) {
        const u16* from = q + i_batch * q_batch + (i_head * GROUP + row) * q_head + 32 * j + 8 * quad;
        if (row < GROUP) copy_async(&query[j][lane], (const uint4*)from);
    }
    commit_copies();

    Lists its;
    its.kv = kv + i_head * kv_head, its.kv_block = (int)kv_block, its.kv_token = (int)kv_token;
    its.pages = pages, its.page = (int)page, its.page_token = (int)page_token;
    its.recent = recent + i_batch * recent_batch + i_head * recent_head, its.recent_token = (int)recent_token;
    its.means = means + i_head * means_head, its.means_block = (int)means_block;
    its.ids = listed, its.table = table + i_batch * table_row;
    its.sealed = sealed, its.n = given;
    its.sinks = (int)sinks, its.ring = max((int)(end - sinks), 1), its.span = (int)span;
    its.near = length > 0 ? min(its.sinks + length - sealed, (int)end) : 0;
    its.spans = means && sealed > 0 ? span_of(sealed - 1) + 1 : 0;
    its.chosen = chosen;
    its.all = its.n + its.near + its.spans;
    its.factor = __uint_as_float((u32)scale_bits) * LOG2E;
#if CODES
    its.scales = scales + i_head * scales_head;
    its.scales_block = (int)scales_block;
#endif
    Place place = look_up(its, entry_of(tile), id);
    if (means) {
        const auto count = [&](int i, int token) {
            if (i < its.n && (u32)token < (u32)sealed) atomicAdd(&chosen[span_of(token)], 1u);
        };
#pragma unroll
        for (int t = 0; t < AHEAD; t++) count(thread + t * THREADS, token[t]);
        for (int i = thread + AHEAD * THREADS; i < its.n; i += THREADS) count(i, tokens_of[i]);
    }
    if (thread == 0) lists = its;  // else it takes registers that loads need
    wait_for_copies<0>();
#if CODES
    for (int j = warp; j < STEPS; j += WARPS) {  // what this thread has copied
        const uint4 of = query[j][lane];
        wide_query[j / 2 * 2 + quad % 2][4 * row + j % 2 * 2 + quad / 2] =
            uint4{__byte_perm(of.x, of.y, 0x5410), __byte_perm(of.x, of.y, 0x7632), __byte_perm(of.z, of.w, 0x5410),
                  __byte_perm(of.z, of.w, 0x7632)};
    }
#endif
    __syncthreads();

    Softmax mine = {{-INF, -INF}, {0, 0}, {}};
    const u32 zero = (u32)(scale_bits >> 32);
    u32 my_tokens = 0, my_far = 0;
    for (; 16 * tile < lists.all; tile += 2 * apart) {
        const Entry entry = settle(lists, entry_of(tile), place);
        place = look_up(lists, entry_of(tile + 2 * apart), next_id);
        const int behind = entry_of(tile + 4 * apart);
        next_id = behind < lists.n ? lists.ids[behind] : -1;
        my_tokens += entry.counts, my_far += entry.far;
#if CODES
        const u32 my_scale = load_4(entry.scales + DIM + entry.in / 2, entry.far) >> entry.in % 2 * 16;
        const u32 far_there = __ballot_sync(~0u, entry.far), there = __ballot_sync(~0u, entry.at && !entry.far);
        __syncwarp();
        entries[warp].codes[lane] = entry.far ? (const Stored*)entry.at : nullptr;
        entries[warp].scales[lane] = entry.far ? (const u16*)entry.scales : nullptr;
        entries[warp].at[lane] = entry.far ? nullptr : (const u16*)entry.at;
        entries[warp].bias[lane] = entry.at && !entry.far ? entry.bias : -INF;
        __syncwarp();
        if (far_there) take_codes(mine, wide_query, entries[warp], far_there, my_scale, lists.factor, zero);
#else
        const u32 there = __ballot_sync(~0u, entry.at != nullptr);
        __syncwarp();  // all have read the last ones
        entries[warp].at[lane] = (const u16*)entry.at, entries[warp].bias[lane] = entry.at ? entry.bias : -INF;
        __syncwarp();
#endif
        if (there & 0xffff) take(mine, query, entries[warp], 0, lists.factor, zero);
        if (there >> 16) take(mine, query, entries[warp], 16, lists.factor, zero);
    }
    release_kernels();

    // The block's result: the sum of its warps', to one base.
    my_tokens = __reduce_add_sync(~0u, my_tokens), my_far = __reduce_add_sync(~0u, my_far);
    if (lane == 0) tokens[warp] = my_tokens, far[warp] = my_far;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        for (int d = 4; d < 32; d *= 2) mine.total[c] += __shfl_xor_sync(~0u, mine.total[c], d);
        if (row == 0) most[warp][2 * quad + c] = mine.most[c], total[warp][2 * quad + c] = mine.total[c];
    }
    __syncthreads();  // from here on the number of chosen tokens is not read any more
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int head = 2 * quad + c;
        if (head >= GROUP) continue;
        float base = -INF;
        for (int w = 0; w < WARPS; w++) base = fmaxf(base, most[w][head]);
        const float keep = exp2f(mine.most[c] - base_of(base));
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            float* to = held + warp * SIZE + head * DIM + 64 * h + 8 * row;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float(&one)[4] = mine.sum[h][i], (&next)[4] = mine.sum[h][i + 1];
                *(float4*)(to + 2 * i) = float4{one[c] * keep, one[2 + c] * keep, next[c] * keep, next[2 + c] * keep};
            }
        }
    }
    __syncthreads();
    cluster_wait();  // for the arrival at the beginning: every block is there
    for (int i = thread; i < SIZE / 4; i += THREADS) {
        float4 sum = {0, 0, 0, 0};
        for (int w = 0; w < WARPS; w++) {
            const float4& its = *(const float4*)(held + w * SIZE + 4 * i);
            sum.x += its.x, sum.y += its.y, sum.z += its.z, sum.w += its.w;
        }
        store_async(&at[rank].sum[i % (SLICE / 4)], i / (SLICE / 4), sum, &mbarrier);
    }
    for (int i = thread; i < GROUP * CLUSTER; i += THREADS) {
        const int head = i % GROUP, to = i / GROUP;
        float base = -INF, sum = 0;
        for (int w = 0; w < WARPS; w++) base = fmaxf(base, most[w][head]);
        for (int w = 0; w < WARPS; w++) sum += total[w][head] * exp2f(most[w][head] - base_of(base));
        store_async(&at[rank].most[head], to, base, &mbarrier);
        store_async(&at[rank].total[head], to, sum, &mbarrier);
    }
    if (thread == 0) {
        u32 all_tokens = 0, all_far = 0;
        for (int w = 0; w < WARPS; w++) all_tokens += tokens[w], all_far += far[w];
        store_async(&at[rank].tokens, 0, all_tokens, &mbarrier);
        store_async(&at[rank].far, 0, all_far, &mbarrier);
    }
    mbarrier_wait(&mbarrier);

    // Denominator of a head, and the base of all that is added up.
    const auto whole = [&](int head, float& base) {
        float sink = -INF;  // a learned one is weight without a value
        if (sink_logits) {
            const i64 i = i_head * GROUP + head;
            sink = (SINK_BYTES == 4 ? ((const float*)sink_logits)[i] : unpack(((const u16*)sink_logits)[i])) * LOG2E;
        }
        base = sink;
        for (int r = 0; r < CLUSTER; r++) base = fmaxf(base, at[r].most[head]);
        base = base_of(base);
        float sum = exp2f(sink - base);
        for (int r = 0; r < CLUSTER; r++) sum += at[r].total[head] * exp2f(at[r].most[head] - base);
        return sum;
    };
    for (int i = thread; i < SLICE; i += THREADS) {
        const int head = (rank * SLICE + i) / DIM, channel = (rank * SLICE + i) % DIM;
        float base, sum = 0;
        const float by = whole(head, base);
        for (int r = 0; r < CLUSTER; r++) sum += ((const float*)at[r].sum)[i] * exp2f(at[r].most[head] - base);
        // A row with nothing to attend to gives zeros.
        const u32 result = pack(by == 0 ? 0 : sum / by, 0);
        out[i_batch * out_batch + (i_head * GROUP + head) * out_head + channel] = (u16)result;
    }
    if (rank) return;
    if (lse && thread < GROUP) {
        float base;
        const float by = whole(thread, base);
        const float log = by == 0 ? -INF : (base + log2f(by)) / LOG2E;
        lse[i_batch * lse_batch + (i_head * GROUP + thread) * lse_head] = log;
    }
    if (thread == 0) {
        u32 all_tokens = 0, all_far = 0;
        for (int r = 0; r < CLUSTER; r++) all_tokens += at[r].tokens, all_far += at[r].far;
        if (attended) attended[i_batch * attended_batch + i_head * attended_head] += all_tokens;
        if (from_host) from_host[i_batch * host_batch + i_head * host_head] += all_far;
    }
}
