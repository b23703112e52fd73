// Scores of tokens from packed labels, by 8-bit products of tensor cores (Hopper and later).
//
// As tensor_core.py: digits 0 to 15 are the rows of a product, and a head's query in fixed point is two columns,
// 128 a + b. Sums are exact, so all that is rounded are the queries, to a 32,512th of their largest number. The mean
// over a group is one query. Here a word of a token's codes is the register of the product that it is needed in, so
// that 64 tokens and four heads take some 150 instructions (of a warp), and 16 loads at once are on their way.

#define WARPS (THREADS / 32)
#define WORDS (WIDTH / 16)            // of a token's codes, in four bytes each, that a thread has
#define VECTORS (MEAN ? 1 : GROUP)    // queries
#define COLUMNS ((VECTORS + 3) / 4)   // products of eight columns
#define CHANNELS (2 * WIDTH)
#define EACH (CHANNELS / 32)          // channels of a lane, while queries are made
#define LARGEST (127 * 128.0f)
#define SPAN (BLOCK < 64 ? BLOCK : 64)  // tokens of a tile that lie in one block
#define SPANS (64 / SPAN)

static_assert(CHANNELS % 32 == 0, "a lane has whole channels");

__device__ __forceinline__ float from_query(u16 bits) {
    return BFLOAT16 ? __uint_as_float((u32)bits << 16) : from_half(bits);
}

struct Queries {
    signed char parts[4 * COLUMNS][2][CHANNELS];  // upper and lower, of the label channels
    float unit[4 * COLUMNS], total[4 * COLUMNS];
};

// Labels of 64 tokens: a thread has WORDS words of eight of them, and the scales and zero points of these.
struct Tile {
    u32 code[4][2][WORDS], pair[4][2];
};

struct Labels {  // of one KV head
    const unsigned char* codes;
    const u32* pairs;
    i64 codes_block, pairs_block;

    // Those of 64 tokens from `token` on, whose blocks lanes `first ..` have looked up.
    __device__ __forceinline__ void load(Tile& tile, int token, int first, int physical) const {
        const u32 lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
        for (int s = 0; s < SPANS; s++) {
            const int block = __shfl_sync(~0u, physical, first + s);
            const u32 at = ((token + SPAN * s) & (BLOCK - 1)) + row;
            const unsigned char* p_code = codes + block * codes_block + (at * WIDTH + 4 * WORDS * quad);
            const u32* p_pair = pairs + block * pairs_block + at;
#pragma unroll
            for (int m = 0; m < SPAN / 16; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int i = s * (SPAN / 16) + m, o = 16 * m + 8 * h;
                    tile.pair[i][h] = p_pair[o];
#pragma unroll
                    for (int w = 0; w < WORDS; w++) tile.code[i][h][w] = *(const u32*)(p_code + o * WIDTH + 4 * w);
                }
            }
        }
    }
};

// A warp makes two columns of each query.
__device__ __forceinline__ void make_queries(Queries& queries, const u16* q, i64 q_head, i64 q_dim,
                                             const int* channels) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int channel[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) channel[e] = channels[e * 32 + lane];
    for (int v = warp; v < 4 * COLUMNS; v += WARPS) {
        float value[EACH], most = 0, total = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            value[e] = 0;
            if (MEAN && v == 0) {
                for (int h = 0; h < GROUP; h++) value[e] += from_query(q[h * q_head + channel[e] * q_dim]);
                value[e] /= GROUP;
            } else if (v < VECTORS) {
                value[e] = from_query(q[v * q_head + channel[e] * q_dim]);
            }
            most = fmaxf(most, fabsf(value[e])), total += value[e];
        }
        for (int d = 16; d; d /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d)), total += __shfl_xor_sync(~0u, total, d);
        }
        const float unit = fmaxf(most, 1e-30f) / LARGEST;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float whole = floorf(value[e] / unit + 0.5f);     // -16256 .. 16256
            const float upper = floorf(whole * 0.0078125f + 0.5f);  // -127 .. 127
            queries.parts[v][0][e * 32 + lane] = (signed char)(int)upper;
            queries.parts[v][1][e * 32 + lane] = (signed char)(int)(whole - 128 * upper);  // -64 .. 63
        }
        // A query that is infinite, or no number, scores nothing.
        if (lane == 0) queries.unit[v] = unit, queries.total[v] = fabsf(total) < INF ? total : NOT_A_NUMBER;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    token_score_labels_kernel(const u16* q, i64 q_batch, i64 q_head, i64 q_dim, const unsigned char* codes,
                              i64 codes_block, i64 codes_head, const u32* pairs, i64 pairs_block, i64 pairs_head,
                              const int* channels, i64 channels_batch, i64 channels_head, const int* table,
                              i64 table_row, float* out, i64 out_batch, i64 out_head, const int* rows, i64 heads,
                              i64 n, i64 stretch, i64 sinks, i64 fill) {
    __shared__ Queries queries;
    const i64 i_batch = blockIdx.y / (u32)heads, i_head = blockIdx.y % (u32)heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    // The next kernel reads what this one writes, and nothing of it before its wait: it may settle beside the last of
    // these blocks.
    wait_for_kernels();
    const int sealed = min((int)n, rows[2 * i_batch + 1]);
    int token = (blockIdx.x * WARPS + warp) * (int)stretch;
    const int end = min(token + (int)stretch, sealed);
    out += i_batch * out_batch + i_head * out_head;
    if (fill)
        for (int i = max(token, sealed) + lane; i < min(token + (int)stretch, (int)n); i += 32) out[i] = -INF;
    if ((int)(blockIdx.x * WARPS * stretch) >= sealed) return;  // all of this block
    table += i_batch * table_row;
    const Labels labels = {codes + i_head * codes_head, pairs + i_head * pairs_head, codes_block, pairs_block};
    // Each lane looks up a block; the first labels are on their way while queries are made.
    int physical = token + SPAN * lane < end ? table[(u32)(token + SPAN * lane) / BLOCK] : -1;
    u32 there = __ballot_sync(~0u, physical >= 0);  // tokens of blocks that are not are loaded, but score nothing
    Tile next;
    if (token < end) labels.load(next, token, 0, max(physical, 0));
    make_queries(queries, q + i_batch * q_batch + i_head * GROUP * q_head, q_head, q_dim,
                 channels + i_batch * channels_batch + i_head * channels_head);
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

#pragma unroll 2
    for (int t = 0; token < end; token += 64) {
        const Tile tile = next;
        const u32 usable = there >> t;
        t += SPANS;
        if (token + 64 < end) {
            if (t == 32) {
                t = 0;
                const int further = token + 64 + SPAN * lane;
                physical = further < end ? table[(u32)further / BLOCK] : -1;
                there = __ballot_sync(~0u, physical >= 0);
            }
            labels.load(next, token + 64, t, max(physical, 0));
        }
        float best[8];  // of tokens 16 m + 8 h + row, of the queries that this thread of a quad has
#pragma unroll
        for (int m = 0; m < 4; m++) {
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
                    const float its = VECTORS % 4 && 4 * c + quad >= VECTORS ? -INF : s;
                    best[2 * m + h] = c ? fmaxf(best[2 * m + h], its) : its;
                }
            }
        }
        // The largest of the four threads of a quad: each ends with two of the eight tokens.
        const int odd = quad & 1, high = quad >> 1, m = 2 * odd + high;
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sent = odd ? best[i] : best[4 + i];
            four[i] = fmaxf(odd ? best[4 + i] : best[i], __shfl_xor_sync(~0u, sent, 1));
        }
        const bool known = usable >> (m / (SPAN / 16)) & 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float sent = high ? four[i] : four[2 + i];
            const float s = fmaxf(high ? four[2 + i] : four[i], __shfl_xor_sync(~0u, sent, 2));
            const int at = token + 16 * m + 8 * i + row;
            if (at < end) out[at] = known && at >= (int)sinks && s == s ? s : -INF;
        }
    }
    release_kernels();
}
