/* See _xxh3.c. */

#ifndef PDXFER_XXH3_H
#define PDXFER_XXH3_H

#include <stdint.h>

#define XXH3_SECRET_BYTES 192
#define XXH3_SHORT_BYTES 240 /* inputs up to this long are not for this file */

typedef struct {
    uint64_t acc[8];
    unsigned char secret[XXH3_SECRET_BYTES];
    unsigned char tail[128];
    int64_t total, stripes, filled;
} Xxh3;

/* Where the caller will read and write next, as far ahead as the piece is long; NULL is nowhere. */
typedef struct {
    const char *read, *write;
} Ahead;

/* Begin a digest of ``total`` bytes; pieces of that many bytes in all must follow, in order. */
void xxh3_begin(Xxh3 *state, uint64_t seed, int64_t total);
void xxh3_add(Xxh3 *state, const void *piece, int64_t nbytes, Ahead ahead);
/* Write the 16 bytes of the digest, high word first. */
void xxh3_end(Xxh3 *state, unsigned char *digest);

#endif
