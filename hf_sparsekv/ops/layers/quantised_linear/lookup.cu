// A linear layer for 1 to 16 rows on tensor cores (Ampere and later). Weights are bytes, converted by a lookup table:
// two 4-bit indices of a codebook each, or numbers of 8 bits (KIND).
//
// Two numbers of 16 bits are one register of a product's left side. A byte with two neighbours of a row is looked up as
// a whole, in a table of 256 pairs in shared memory with one copy per bank. Bytes of one number each are looked up
// separately, and two are combined. Weights are the 16 rows of a product, rows of x its 8 columns. Inputs may come in
// any order that is the same on both sides, so a thread loads adjacent bytes straight into the registers that use them.
//
// Scales belong to 64 inputs of a row, or more, and no product may have inputs of two scales. Where x has few rows, its
// columns are there SPLIT times: a column has the inputs of one scale, and zeros for those of the others, which other
// threads of a quad hold. With 4 bits a thread therefore takes 16 or 32 adjacent bytes, not 8, and a quad 64 or 128.
//
// Where each warp has inputs of one unit, it holds them (HOLD).
//
// The warps of a block share the inputs, the blocks the rows of the weight; a block's warps add up at the end of its
// rows. (Each block reads all of x then, as much as the weights with many rows; clusters that share it took longer.)
// Weights depend on no kernel: the first are loaded before the preceding kernels have ended.

#define CODEBOOK 0
#define INT8 1
#define E4M3 2
#define PER_16 (KIND == CODEBOOK ? 8 : 16)  // bytes of 16 inputs
#define LINE 64                       // words from a line of the table to the next
#define WARPS (THREADS / 32)
#define CHUNK (PER_16 * SPLIT)       // bytes of a row that a thread takes at once
#define SPAN (4 * CHUNK)             // that a quad takes
#define UNIT (PARTS * SPAN)          // that it asks for at once
#define WORDS (2 * SPLIT)            // of eight inputs each, in a chunk
#define EIGHT (PER_16 / 8)           // words of eight inputs
#define SCALES (PARTS * SPLIT)       // of 64 inputs each, of a row, in a unit
#define ROWS (16 * TILES)            // of the weight, that a block has at once
#define EACH (8 / SPLIT)             // rows of x in a product
#define MOST (EACH * COLUMNS)        // rows of x
#define ADDED (WARPS * MOST * ROWS)  // sums of all warps
// Whether there is room for sums beside those that are read.
#define TWICE (2 * ADDED <= 256 * 32)
// Sums of a tile that do not wait for one another: a product takes some 30 clocks.
#define CHAINS (TILES * COLUMNS == 1 ? 2 : 1)

static_assert(SCALES <= 4, "each thread of a quad reads one of them");
static_assert(COLUMNS == 1 || SPLIT == 1, "few rows of x are columns of one product");
static_assert(ADDED <= 256 * 32, "sums have room between the table's lines");

struct alignas(CHUNK == 8 ? 8 : 16) Chunk {
    u32 word[EIGHT * WORDS];
};

// Of a unit, what a thread has: rows `row` and `row + 8` of each tile.
struct Piece {
    Chunk codes[PARTS][2 * TILES];
    float scale[2 * TILES];
};

__device__ __forceinline__ void load(Chunk& to, const char* from) {
#if CHUNK == 8
    const uint2 both = load_once((const uint2*)from);
    to.word[0] = both.x, to.word[1] = both.y;
#else
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        const uint4 all = load_once((const uint4*)from + i);
        to.word[4 * i] = all.x, to.word[4 * i + 1] = all.y, to.word[4 * i + 2] = all.z, to.word[4 * i + 3] = all.w;
    }
#endif
}

// What the table has for byte `i` of a word, for this lane. With lines of 256 bytes its address takes one instruction:
// the byte is its second one, and the lane its first.
__device__ __forceinline__ u32 look_up(const float* table, u32 word, int i, u32 lane_4) {
    return *(const u32*)((const char*)table + __byte_perm(word, lane_4, 0x5504 + 16 * i));
}

// Of eight inputs in one or two words, the pair `i` of four.
__device__ __forceinline__ u32 pair_of(const float* table, const u32* words, int i, u32 lane_4) {
    if (KIND == CODEBOOK) return look_up(table, words[0], i, lane_4);
    const u32 word = words[i / 2];
    return __byte_perm(look_up(table, word, i % 2 * 2, lane_4), look_up(table, word, i % 2 * 2 + 1, lane_4), 0x5410);
}

// The number that a byte is.
__device__ __forceinline__ float number_of(int byte) {
    if (KIND == INT8) return (float)(signed char)byte;
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    float number = exponent ? __int_as_float((exponent + 120) << 23 | fraction << 20) : fraction / 512.0f;
    if ((byte & 127) == 127) number = NOT_A_NUMBER;
    return byte & 128 ? -number : number;
}

// Position of sum `i` in the table's memory, after `whole` times 32 others: in the half between the table's lines.
__device__ __forceinline__ u32 place(u32 whole, u32 i) {
    return 64 * whole + i / 32 * 64 + 32 + i % 32;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    lookup_linear_kernel(const u16* x, i64 x_row, const char* codes, i64 codes_row, const float* scales,
                           i64 scales_row, i64 log_rows, i64 log_block, const float* codebook, const u16* bias, u16* out,
                           i64 out_row, i64 rows, i64 n_out, i64 n_in, i64 blocks) {
    DYNAMIC_SHARED(table);
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32, row = lane / 4, quad = lane % 4;
    const int outputs = (int)n_out, bytes = (int)(n_in / 16 * PER_16), scales_there = (int)(n_in / 64);
    const int units = (bytes + UNIT - 1) / UNIT, groups = (outputs + ROWS - 1) / ROWS;

    const float number = KIND == CODEBOOK ? load_constant(codebook + lane % 16) : 0;

    // Reads past the last row or input go elsewhere; their results are not stored, or are multiplied by a scale of 0.
    const auto ask = [&](Piece& piece, int group, int unit) {
        const int its = unit * SCALES + quad % SCALES;
        const bool is_one = its < scales_there;
        const u32 block = (is_one ? its : 0) >> ((int)log_block - 6);
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const u32 at = min(group * ROWS + 8 * i + row, outputs - 1);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int byte = unit * UNIT + p * SPAN + quad * CHUNK;
                load(piece.codes[p][i], codes + (at * (u32)codes_row + (byte < bytes ? byte : 0)));
            }
            piece.scale[i] = load_constant(scales + ((at >> (int)log_rows) * (u32)scales_row + block));
            if (!is_one) piece.scale[i] = 0;
        }
    };
    Piece pieces[AHEAD];
    const int first_unit = warp, first_group = blockIdx.x;
    int next_group = first_unit < units ? first_group : groups, next_unit = first_unit;
    const auto ask_next = [&](Piece& piece) {
        if (next_group >= groups) return;
        ask(piece, next_group, next_unit);
        next_unit += WARPS;
        if (next_unit >= units) next_unit = first_unit, next_group += (int)blocks;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask_next(pieces[i]);

#pragma unroll
    for (int j = 0; j < (63 + WARPS) / WARPS; j++) {
        const int i = 4 * (warp + j * WARPS) + lane / 8;
        const u32 pair = KIND == CODEBOOK ? pack(__shfl_sync(~0u, number, i / 16), __shfl_sync(~0u, number, i % 16))
                                          : pack(number_of(i), 0);
        if (i < 256) ((uint4*)table)[i * LINE / 4 + thread % 8] = {pair, pair, pair, pair};
    }
    // The thread's row of x is that of its column, and the thread's inputs those of its scale; or all are 0.
    const u16* its_x[COLUMNS];
    bool is_any[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int which = 8 * c + row % EACH;
        its_x[c] = keep(x + which * x_row);
        is_any[c] = row / EACH == quad * SPLIT / 4 && which < (int)rows;
    }
    const u32 lane_4 = 4 * lane;
    __syncthreads();
    wait_for_kernels();

    uint4 inputs[PARTS][COLUMNS][WORDS] = {};  // of the next unit
    const auto inputs_of = [&](int c, int unit, int p) {
        const int byte = unit * UNIT + p * SPAN + quad * CHUNK;
        return (const uint4*)(its_x[c] + (byte < bytes ? byte : 0) * 16 / PER_16);
    };
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const uint4* from = inputs_of(c, first_unit, p);
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                if (is_any[c]) inputs[p][c][w] = from[w];
        }
    }

    float total[TILES][COLUMNS][4] = {};  // of rows `row` and `row + 8`, two columns each
    const auto take = [&](const Piece& piece, int after) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const uint4* from[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) from[c] = inputs_of(c, after, p);
            float sum[TILES][COLUMNS][CHAINS][4] = {};
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const u32* upper = &piece.codes[p][2 * t].word[EIGHT * w];
                    const u32* lower = &piece.codes[p][2 * t + 1].word[EIGHT * w];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u32 numbers[4] = {
                            pair_of(table, upper, 2 * h, lane_4), pair_of(table, lower, 2 * h, lane_4),
                            pair_of(table, upper, 2 * h + 1, lane_4), pair_of(table, lower, 2 * h + 1, lane_4)};
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++) {
                            const uint4& its = inputs[p][c][w];
                            multiply(sum[t][c][h % CHAINS], numbers, h ? its.z : its.x, h ? its.w : its.y);
                        }
                    }
                }
                // Those of the next unit take their place, so that they come meanwhile.
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if (!HOLD && is_any[c]) inputs[p][c][w] = from[c][w];
            }
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                float scale = piece.scale[i];
                if (SPLIT < 4) scale = __shfl_sync(~0u, scale, (lane & 28) + p * SPLIT + quad * SPLIT / 4);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                    for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) {
#pragma unroll
                        for (int h = 0; h < CHAINS; h++) total[i / 2][c][e] += scale * sum[i / 2][c][h][e];
                    }
                }
            }
        }
    };
    // The warps' sums of the block's rows, to the result.
    const auto finish = [&](int group, bool odd) {
        const u32 sums = TWICE && odd ? ADDED / 32 : 0;  // where they are, in 32
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    for (int d = 4 / SPLIT; d < 4; d *= 2)  // over scales side by side
                        total[t][c][e] += __shfl_xor_sync(~0u, total[t][c][e], d);
                    const u32 of_x = 8 * c + 2 * quad + e % 2;
                    const u32 i = of_x * ROWS + 16 * t + e / 2 * 8 + row;
                    // Places are such that each thread of a quad has other banks.
                    const u32 at = place(sums + warp * (MOST * ROWS / 32), i ^ (of_x / 2 % 4 * 8));
                    if (quad < 4 / SPLIT) table[at] = total[t][c][e];
                    total[t][c][e] = 0;
                }
            }
        }
        __syncthreads();
        for (int i = thread; i < (int)rows * ROWS; i += THREADS) {
            const int of_x = i / ROWS, output = group * ROWS + i % ROWS;
            if (output >= outputs) continue;
            const float* from = table + place(sums, i ^ (of_x / 2 % 4 * 8));
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += from[w * (MOST * ROWS / 32 * LINE)];
            if (bias) sum += unpack(bias[output]);
            out[of_x * out_row + output] = (u16)pack(sum, 0);
        }
        if (!TWICE) __syncthreads();
    };
    int group = first_group, unit = first_unit;
    bool odd = false;
    while (group < groups) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (next_group >= groups) release_kernels();  // all is asked for
            const int after = unit + WARPS < units ? unit + WARPS : first_unit;
            take(pieces[i], after);
            ask_next(pieces[i]);
            unit = after;
            if (unit != first_unit) continue;
            finish(group, odd);
            group += (int)blocks, odd = !odd;
            if (group >= groups) break;
        }
    }
}
