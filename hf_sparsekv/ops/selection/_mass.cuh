// What the kernels that estimate attention masses share: sums of powers of two, relative to their largest one.

#define LOG2E 1.4426950408889634f
#define HIGHEST 1e30f  // of logits: differences of infinities are no numbers

// What is no number makes the sum none.
struct Sum {
    float most, total;

    __device__ __forceinline__ void add(float x) { add(Sum{x, x == -INF ? 0.0f : x - x + 1}); }

    __device__ __forceinline__ void add(const Sum& other) {
        const float top = fmaxf(most, other.most), base = top == -INF ? 0 : top;
        total = total * power(most - base) + other.total * power(other.most - base), most = top;
    }

    // Of the lanes whose numbers differ in the bits from `least` on.
    __device__ __forceinline__ void of_lanes(int least = 1) {
        for (int d = 16; d >= least; d /= 2)
            add(Sum{__shfl_xor_sync(~0u, most, d), __shfl_xor_sync(~0u, total, d)});
    }

    __device__ __forceinline__ float log() const { return (most == -INF ? 0 : most) + log2f(total); }
};

// A score that is not infinite any more, so that its difference from another is a number. What is no number stays so.
__device__ __forceinline__ float bounded(float score, float largest) { return score > largest ? largest : score; }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INF; }
