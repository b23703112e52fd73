// Numbers of 16 bits, bfloat16 or float16 as BFLOAT16 says: for sources that define it.

__device__ __forceinline__ u32 pack(float low, float high) {
    return BFLOAT16 ? pack_bfloat16(low, high) : pack_half(low, high);
}

__device__ __forceinline__ float unpack(u16 bits) {
    return BFLOAT16 ? __uint_as_float((u32)bits << 16) : from_half(bits);
}

// c += a b, see multiply_half.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 front, u32 back) {
    const u32 b[2] = {front, back};
    if (BFLOAT16) {
        multiply_bfloat16(c, a, b);
    } else {
        multiply_half(c, a, b);
    }
}
