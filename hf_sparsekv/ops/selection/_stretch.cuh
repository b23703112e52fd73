// What a warp of the cluster kernel reads of a row of scores, and keeps.

// A warp's stretch of a row. The warp keeps some of its scores.
struct Stretch {
    const float* from;            // a lane's first four entries
    int length;                   // of the warp's
    float4 ahead[AHEAD][PIECES];  // of the next tiles

    __device__ __forceinline__ Stretch(const float* first, int entries)
        : from(first + 4 * (threadIdx.x % 32)), length(entries) {}

    __device__ __forceinline__ void read(float4 (&to)[PIECES], int tile) const {
        const float* next = from + tile;
        if (tile + TILE <= length && (u64)from % 16 == 0) {
#pragma unroll
            for (int p = 0; p < PIECES; p++) to[p] = *(const float4*)(next + 128 * p);
            return;
        }
        const int left = length - tile - 4 * (int)(threadIdx.x % 32);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int o = 128 * p;
            to[p].x = o < left ? next[o] : -INF, to[p].y = o + 1 < left ? next[o + 1] : -INF;
            to[p].z = o + 2 < left ? next[o + 2] : -INF, to[p].w = o + 3 < left ? next[o + 3] : -INF;
        }
    }

    __device__ __forceinline__ void read_first() {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) read(ahead[a], a * TILE);
    }

    // Keep the scores from `low` (finite) on and their positions; returns how many. `first` is the stretch's position
    // in the row. NaN is not kept. The first tiles have been read already.
    __device__ __forceinline__ int keep(float low, float* held, u16* where, int first) {
        const int place = first + 4 * (threadIdx.x % 32);
        int kept = 0;
        const auto keep_tile = [&](float4 (&four)[PIECES], int tile) {
            float each[PIECES][4];
            u32 mine = 0;  // of each piece, in 16 bits
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                each[p][0] = four[p].x, each[p][1] = four[p].y, each[p][2] = four[p].z, each[p][3] = four[p].w;
#pragma unroll
                for (int c = 0; c < 4; c++) mine += each[p][c] >= low ? 1 << 16 * p : 0;
            }
            read(four, tile + AHEAD * TILE);
            const u32 with = sum_to_here(mine), all = __shfl_sync(~0u, with, 31), before = with - mine;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                const int to = kept + (before >> 16 * p & 0xffff);
                float* to_held = held + to;
                u16* to_where = where + to;
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (each[p][c] >= low) *to_held++ = each[p][c], *to_where++ = place + tile + 128 * p + c;
                kept += all >> 16 * p & 0xffff;
            }
        };
        for (int tile = 0; tile < length;) {
#pragma unroll
            for (int a = 0; a < AHEAD; a++, tile += TILE)
                if (tile < length) keep_tile(ahead[a], tile);
        }
        __syncwarp();
        return kept;
    }
};
