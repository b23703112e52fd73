// A linear layer of a few rows: weights go from memory to the registers in which tensor cores take them.
//
// A block has 16 rows of the weight; its warps take every so many 32 STEPS inputs of them, of which half are on their
// way while the others are multiplied. The first are asked for before the kernel that makes `x` has ended: no kernel
// writes weights. Inputs are in another order in these products, the same on both sides, so that each load takes 16
// bytes. `x` is read by all blocks, so that but for the first time it comes from a processor's own cache.
//
// With an activation, eight of the 16 rows are gates, and eight what they are multiplied by: a thread has both.

#define WARPS (THREADS / 32)
#define COLUMNS ((ROWS + 7) / 8)  // products of eight columns, each a row of `x`
#define WIDTH (32 * STEPS)        // inputs that a warp has on its way at once, twice
#define GATED (ACTIVATION > 0)
#define OUTPUTS (GATED ? 8 : 16)  // of a block

__device__ __forceinline__ float rounded(float value) { return unpack((u16)pack(value, 0)); }

// As ops/gated: the activation of `gate` times `up`, both of 16 bits.
__device__ __forceinline__ float gate_times_up(float gate, float up) {
    const float argument = ACTIVATION == 1 ? gate : 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return rounded(gate / (1.0f + exp2f(-1.4426950408889634f * argument))) * up;
}

struct Weights {  // of a thread: eight inputs of rows `lane / 4` and that plus eight, STEPS times
    uint4 of[2][STEPS];
};

__device__ __forceinline__ void load(Weights& weights, const u16* const (&row)[2], const bool (&there)[2], int from,
                                     int inputs) {
    const int first = from + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            weights.of[r][j] = load_16(row[r] + first + 32 * j, there[r] && first + 32 * j < inputs);
    }
}

__device__ __forceinline__ void multiply_by(float (&sum)[COLUMNS][4], const Weights& weights, const u16* x,
                                            i64 x_row, int from, int inputs) {
    const int row = threadIdx.x % 32 / 4, first = from + threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        uint4 eight[STEPS];
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            eight[j] = load_16(x + (8 * c + row) * x_row + first + 32 * j, 8 * c + row < ROWS && first + 32 * j < inputs);
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            const uint4 &upper = weights.of[0][j], &lower = weights.of[1][j];
            const u32 front[4] = {upper.x, lower.x, upper.y, lower.y}, back[4] = {upper.z, lower.z, upper.w, lower.w};
            multiply(sum[c], front, eight[j].x, eight[j].y);
            multiply(sum[c], back, eight[j].z, eight[j].w);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    small_linear_skinny_kernel(const u16* x, i64 x_row, const u16* weight, i64 weight_row, const u16* bias, u16* out,
                               i64 n, i64 k) {
    __shared__ float4 part[WARPS][COLUMNS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, inputs = (int)k;
    const int output = blockIdx.x * OUTPUTS;
    const int first = output + lane / 4, second = GATED ? (int)n + first : first + 8;  // rows of the weight
    const u16* const row[2] = {weight + first * weight_row, weight + second * weight_row};
    const bool there[2] = {first < (int)n, (GATED ? first : second) < (int)n};
    const int apart = 2 * WARPS * WIDTH;
    int from = 2 * warp * WIDTH;
    Weights one, other;
    load(one, row, there, from, inputs);
    load(other, row, there, from + WIDTH, inputs);
    release_kernels();
    wait_for_kernels();
    float sum[COLUMNS][4] = {};
    for (; from < inputs; from += apart) {
        multiply_by(sum, one, x, x_row, from, inputs);
        load(one, row, there, from + apart, inputs);
        multiply_by(sum, other, x, x_row, from + WIDTH, inputs);
        load(other, row, there, from + apart + WIDTH, inputs);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        part[warp][c][lane] = float4{sum[c][0], sum[c][1], sum[c][2], sum[c][3]};
    __syncthreads();
    // Entry i of lane l of a product is in row l / 4 + 8 (i / 2) of the weight's, of column 2 (l % 4) + i % 2.
    const auto total = [&](int w_row, int column) {
        const int l = w_row % 8 * 4 + column % 8 / 2, i = w_row / 8 * 2 + column % 2;
        float all = 0;
        for (int w = 0; w < WARPS; w++) all += ((const float*)&part[w][column / 8][l])[i];
        const i64 at = GATED ? output + w_row % 8 + w_row / 8 * n : output + w_row;
        return bias ? all + unpack(bias[at]) : all;
    };
    for (int i = threadIdx.x; i < OUTPUTS * ROWS; i += THREADS) {
        const int column = i / OUTPUTS, w_row = i % OUTPUTS;
        if (output + w_row >= (int)n) continue;
        float value = total(w_row, column);
        if (GATED) value = gate_times_up(rounded(value), rounded(total(w_row + 8, column)));
        out[column * n + output + w_row] = (u16)pack(value, 0);
    }
}
