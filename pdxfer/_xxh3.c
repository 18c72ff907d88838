/* XXH3-128 of bytes that lie in pieces: the digest of ``wire.digest``, taken where the bytes lie.
 *
 * In come a seed, the total length (above 240 bytes: shorter inputs have other rules, and Python's xxhash does them) and
 * pieces in order; out come two 64-bit words. The algorithm is the public one (github.com/Cyan4973/xxHash,
 * doc/xxhash_spec.md), so that an agent without this file computes the same with the xxhash package; the tests compare.
 *
 *     input    |-- stripe 0, 64 B --|-- stripe 1 --| ... |-- stripe n-1 --|- 1 to 64 B -|
 *     secret    bytes 0..64          bytes 8..72    ...   (k % 16) * 8
 *     after every 16 stripes: scramble              last: the final 64 bytes of the input, once more, under another key
 *
 * Arithmetic on bytes that are in cache leaves the memory idle. So each stripe also asks for a line of what the caller
 * will touch next (``Ahead``): measured, that halves what a digest adds to a copy.
 */

#include "_xxh3.h"

#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_X86_CODE 1
#endif

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u
#define BLOCK_STRIPES 16

/* The algorithm's own constant: part of its definition. */
static const unsigned char SECRET[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read64(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void write64(unsigned char *p, uint64_t value) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    memcpy(p, &value, 8);
}

/* ---- stripes: ``count`` of them from ``first`` on (counted from the start of the input) ------------------------- */

static void one_stripe(uint64_t *acc, const unsigned char *p, const unsigned char *key) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(p + 8 * i), mixed = value ^ read64(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (uint64_t)(uint32_t)mixed * (mixed >> 32);
    }
}

static void scramble(uint64_t *acc, const unsigned char *key) {
    for (int i = 0; i < 8; i++) {
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(key + 8 * i)) * P32_1;
    }
}

static void prefetch(Ahead *ahead) {
    __builtin_prefetch(ahead->read, 0);
    __builtin_prefetch(ahead->write, 1);
    ahead->read += 64;
    ahead->write += 64;
}

static void many_stripes_plain(Xxh3 *state, const unsigned char *p, int64_t first, int64_t count, Ahead ahead) {
    for (int64_t k = first; k < first + count; k++, p += 64) {
        prefetch(&ahead);
        one_stripe(state->acc, p, state->secret + 8 * (k % BLOCK_STRIPES));
        if (k % BLOCK_STRIPES == BLOCK_STRIPES - 1) {
            scramble(state->acc, state->secret + XXH3_SECRET_BYTES - 64);
        }
    }
}

#ifdef HAVE_X86_CODE
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))

__attribute__((target("avx2"))) static __m256i stripe_half_avx2(__m256i acc, const unsigned char *p, const unsigned char *key) {
    __m256i value = LOAD(p), mixed = _mm256_xor_si256(value, LOAD(key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(acc, product), _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));
}

__attribute__((target("avx2"))) static __m256i scramble_half_avx2(__m256i acc, const unsigned char *key) {
    __m256i prime = _mm256_set1_epi64x(P32_1);
    acc = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), LOAD(key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void many_stripes_avx2(Xxh3 *state, const unsigned char *p, int64_t first, int64_t count,
                                                              Ahead ahead) {
    __m256i low = LOAD(&state->acc[0]), high = LOAD(&state->acc[4]);
    for (int64_t k = first; k < first + count;) {
        int64_t within = k % BLOCK_STRIPES, stop = within + (first + count - k);
        stop = stop < BLOCK_STRIPES ? stop : BLOCK_STRIPES;
        k += stop - within;
        for (; within < stop; within++, p += 64) {
            prefetch(&ahead);
            low = stripe_half_avx2(low, p, state->secret + 8 * within);
            high = stripe_half_avx2(high, p + 32, state->secret + 8 * within + 32);
        }
        if (within == BLOCK_STRIPES) {
            low = scramble_half_avx2(low, state->secret + XXH3_SECRET_BYTES - 64);
            high = scramble_half_avx2(high, state->secret + XXH3_SECRET_BYTES - 32);
        }
    }
    _mm256_storeu_si256((__m256i *)&state->acc[0], low);
    _mm256_storeu_si256((__m256i *)&state->acc[4], high);
}
#endif

static void many_stripes(Xxh3 *state, const unsigned char *p, int64_t count, Ahead ahead) {
#ifdef HAVE_X86_CODE
    if (__builtin_cpu_supports("avx2")) {
        many_stripes_avx2(state, p, state->stripes, count, ahead);
    } else
#endif
        many_stripes_plain(state, p, state->stripes, count, ahead);
    state->stripes += count;
}

/* ---- the stream ---------------------------------------------------------------------------------------------- */

void xxh3_begin(Xxh3 *state, uint64_t seed, int64_t total) {
    static const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(state->acc, start, sizeof start);
    for (int i = 0; i < XXH3_SECRET_BYTES; i += 16) {
        write64(state->secret + i, read64(SECRET + i) + seed);
        write64(state->secret + i + 8, read64(SECRET + i + 8) - seed);
    }
    state->total = total;
    state->stripes = 0;
    state->filled = 0;
    memset(state->tail, 0, sizeof state->tail);
}

/* ``tail`` holds the last 64 whole bytes before the part of a stripe that is being filled, then that part. */
void xxh3_add(Xxh3 *state, const void *piece, int64_t nbytes, Ahead ahead) {
    const unsigned char *p = piece;
    ahead.read = ahead.read ? ahead.read : piece; /* asking for what is here already costs next to nothing */
    ahead.write = ahead.write ? ahead.write : (const char *)piece;
    int64_t stripes = (state->total - 1) / 64; /* the rest, 1 to 64 bytes, belongs to the last stripe */
    if (state->filled) {
        int64_t taken = 64 - state->filled < nbytes ? 64 - state->filled : nbytes;
        memcpy(state->tail + 64 + state->filled, p, (size_t)taken);
        state->filled += taken;
        p += taken;
        nbytes -= taken;
        if (state->filled < 64 || state->stripes == stripes) {
            return;
        }
        many_stripes(state, state->tail + 64, 1, ahead);
        memcpy(state->tail, state->tail + 64, 64);
        state->filled = 0;
    }
    int64_t whole = nbytes / 64 < stripes - state->stripes ? nbytes / 64 : stripes - state->stripes;
    if (whole > 0) {
        many_stripes(state, p, whole, ahead);
        p += 64 * whole;
        nbytes -= 64 * whole;
        memcpy(state->tail, p - 64, 64);
    }
    memcpy(state->tail + 64, p, (size_t)nbytes);
    state->filled = nbytes;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t *acc, const unsigned char *key, uint64_t start) {
    for (int i = 0; i < 4; i++) {
        start += fold(acc[2 * i] ^ read64(key + 16 * i), acc[2 * i + 1] ^ read64(key + 16 * i + 8));
    }
    start = (start ^ (start >> 37)) * 0x165667919E3779F9u;
    return start ^ (start >> 32);
}

void xxh3_end(Xxh3 *state, unsigned char *digest) {
    one_stripe(state->acc, state->tail + state->filled, state->secret + XXH3_SECRET_BYTES - 64 - 7);
    uint64_t length = (uint64_t)state->total;
    uint64_t low = merge(state->acc, state->secret + 11, length * P64_1);
    uint64_t high = merge(state->acc, state->secret + XXH3_SECRET_BYTES - 64 - 11, ~(length * P64_2));
    for (int i = 0; i < 8; i++) {
        digest[i] = (unsigned char)(high >> (56 - 8 * i));
        digest[8 + i] = (unsigned char)(low >> (56 - 8 * i));
    }
}
