/* The copy kernel: scattered boxes and runs between two byte buffers.
 *
 * In come two buffers, int64 arrays of byte offsets, and one box shape with byte strides on either side; out come
 * moved bytes and their count. This file knows nothing of pages, layers or dtypes: packing.py has turned those
 * into offsets and strides, and merged what lies next to each other.
 *
 *     for i in range(n):                     target_offsets[i], source_offsets[i], rows[i]
 *         for r in range(rows[i]):           target_row_stride, source_row_stride
 *             for index in ndindex(shape):   target_strides, source_strides
 *                 memcpy(run_bytes)
 *
 * Everything is checked, in arithmetic that can't overflow, before the first byte moves; a refusal is a ValueError
 * that names the index and leaves the target as it was. Copying runs without the GIL: the buffers are held, but it is
 * the caller's part not to write the offset arrays meanwhile, and not to let the two ends overlap in memory.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "_xxh3.h"

#define SHAPE_DIMS_MAX 6
#define DIMS_MAX (SHAPE_DIMS_MAX + 1) /* one for rows */
#define LINE_BYTES 64
#define PREFETCH_ITEMS 4 /* how far ahead, and how much of each item: measured best from 256 B to 4 KiB runs */
#define PREFETCH_BYTES 1024
#define PAST_CACHES_BYTES (1 << 20) /* from here on a copy without a digest leaves the caches to others */
#define PIECE_BYTES 4096 /* copied, then read back for the digest while it is in L1, with the next one on its way there */

typedef struct {
    int64_t extent, target_stride, source_stride;
} Dim;

typedef struct {
    const char *name;
    Py_buffer view; /* view.obj is NULL until it is held */
    const int64_t *values;
    Py_ssize_t count;
} Ints;

/* ---- arguments ------------------------------------------------------------------------------------------------ */

static int is_int64_format(const char *format) {
    if (format == NULL) {
        return 0;
    }
    if (*format == '@' || *format == '=' || *format == (PY_LITTLE_ENDIAN ? '<' : '>')) {
        format++;
    }
    return (*format == 'q' || *format == 'l') && format[1] == '\0';
}

static int hold_ints(PyObject *object, Ints *ints) {
    if (PyObject_GetBuffer(object, &ints->view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    if (ints->view.ndim != 1 || ints->view.itemsize != 8 || !is_int64_format(ints->view.format)) {
        PyErr_Format(PyExc_ValueError, "%s must be one row of int64, got format '%s', itemsize %zd, %d dimensions", ints->name,
                     ints->view.format ? ints->view.format : "B", ints->view.itemsize, ints->view.ndim);
        return -1;
    }
    ints->values = (const int64_t *)ints->view.buf;
    ints->count = ints->view.len / 8;
    return 0;
}

static void release_ints(Ints *ints, int count) {
    for (int i = 0; i < count; i++) {
        if (ints[i].view.obj != NULL) {
            PyBuffer_Release(&ints[i].view);
        }
    }
}

/* Hold ``count`` int64 arrays that must be of one length; on failure nothing stays held. */
static int hold_all_ints(PyObject **objects, Ints *ints, int count) {
    for (int i = 0; i < count; i++) {
        if (hold_ints(objects[i], &ints[i]) < 0) {
            release_ints(ints, count);
            return -1;
        }
        if (ints[i].count != ints[0].count) {
            PyErr_Format(PyExc_ValueError, "%s has %zd entries, %s has %zd", ints[i].name, ints[i].count, ints[0].name,
                         ints[0].count);
            release_ints(ints, count);
            return -1;
        }
    }
    return 0;
}

/* Read a tuple of ``count`` ints (any count up to the maximum when ``count`` is -1); returns the count or -1. */
static Py_ssize_t read_tuple(PyObject *object, const char *name, Py_ssize_t count, int64_t *values) {
    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of ints, not %.100s", name, Py_TYPE(object)->tp_name);
        return -1;
    }
    Py_ssize_t size = PyTuple_GET_SIZE(object);
    if (size > SHAPE_DIMS_MAX || (count >= 0 && size != count)) {
        PyErr_Format(PyExc_ValueError, "%s has %zd entries; shape and strides must agree and have at most %d", name, size,
                     SHAPE_DIMS_MAX);
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(object, i));
        if (value == -1 && PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
                PyErr_Format(PyExc_ValueError, "%s[%zd] does not fit in 64 bits", name, i);
            }
            return -1;
        }
        if (value < 0) {
            PyErr_Format(PyExc_ValueError, "%s[%zd] is %lld; it must not be negative", name, i, value);
            return -1;
        }
        values[i] = value;
    }
    return size;
}

static int read_dims(PyObject *shape, PyObject *target_strides, PyObject *source_strides, Dim *dims, Py_ssize_t *ndim) {
    int64_t extents[SHAPE_DIMS_MAX], target[SHAPE_DIMS_MAX], source[SHAPE_DIMS_MAX];
    *ndim = read_tuple(shape, "shape", -1, extents);
    if (*ndim < 0 || read_tuple(target_strides, "target_strides", *ndim, target) < 0 ||
        read_tuple(source_strides, "source_strides", *ndim, source) < 0) {
        return -1;
    }
    for (Py_ssize_t d = 0; d < *ndim; d++) {
        if (extents[d] > 1 && target[d] == 0) {
            PyErr_Format(PyExc_ValueError, "target_strides[%zd] is 0: %lld elements would be written over each other", d,
                         (long long)extents[d]);
            return -1;
        }
        dims[d] = (Dim){extents[d], target[d], source[d]};
    }
    return 0;
}

/* ---- bounds --------------------------------------------------------------------------------------------------- */

/* offset + (rows - 1) * stride + span <= length, without overflow; all arguments are checked to be >= 0 but offset. */
static int is_inside(int64_t offset, int64_t rows, int64_t stride, int64_t span, int64_t length) {
    int64_t end;
    return offset >= 0 && !__builtin_mul_overflow(rows - 1, stride, &end) && !__builtin_add_overflow(end, span, &end) &&
           !__builtin_add_overflow(end, offset, &end) && end <= length;
}

static int refuse_outside(const Ints *offsets, Py_ssize_t i, const char *side, int64_t rows, int64_t length) {
    PyErr_Format(PyExc_ValueError, "%s[%zd] = %lld with %lld rows leaves the %s of %lld bytes", offsets->name, i,
                 (long long)offsets->values[i], (long long)rows, side, (long long)length);
    return -1;
}

/* Bytes from the first to behind the last byte of one row's box on either side, and the bytes that it moves. */
static int measure_box(const Dim *dims, Py_ssize_t ndim, int64_t run, int64_t *target_span, int64_t *source_span, int64_t *volume) {
    *target_span = *source_span = *volume = run;
    for (Py_ssize_t d = 0; d < ndim; d++) {
        int64_t last = dims[d].extent > 0 ? dims[d].extent - 1 : 0, target, source;
        if (__builtin_mul_overflow(last, dims[d].target_stride, &target) ||
            __builtin_add_overflow(*target_span, target, target_span) ||
            __builtin_mul_overflow(last, dims[d].source_stride, &source) ||
            __builtin_add_overflow(*source_span, source, source_span) ||
            __builtin_mul_overflow(*volume, dims[d].extent, volume)) {
            PyErr_Format(PyExc_ValueError, "shape[%zd] times its stride does not fit in 64 bits", d);
            return -1;
        }
    }
    return 0;
}

/* Prove every item in bounds; returns the bytes that will move, or -1. ``ints`` are target, source, rows. */
static int64_t check_boxes(const Ints *ints, Dim row, const Dim *dims, Py_ssize_t ndim, int64_t run, int64_t target_length,
                           int64_t source_length) {
    int64_t target_span, source_span, volume, total = 0;
    if (measure_box(dims, ndim, run, &target_span, &source_span, &volume) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < ints[0].count; i++) {
        int64_t rows = ints[2].values[i], moved;
        if (rows < 0 || (rows > 1 && row.target_stride == 0)) {
            PyErr_Format(PyExc_ValueError, "rows[%zd] is %lld; it must not be negative, nor above 1 at a target_row_stride of 0", i,
                         (long long)rows);
            return -1;
        }
        if (rows == 0 || volume == 0) {
            continue;
        }
        if (!is_inside(ints[0].values[i], rows, row.target_stride, target_span, target_length)) {
            return refuse_outside(&ints[0], i, "target", rows, target_length);
        }
        if (!is_inside(ints[1].values[i], rows, row.source_stride, source_span, source_length)) {
            return refuse_outside(&ints[1], i, "source", rows, source_length);
        }
        if (__builtin_mul_overflow(rows, volume, &moved) || __builtin_add_overflow(total, moved, &total)) {
            PyErr_Format(PyExc_ValueError, "the bytes moved up to rows[%zd] do not fit in 64 bits", i);
            return -1;
        }
    }
    return total;
}

/* ---- copying -------------------------------------------------------------------------------------------------- */

/* A square of elements, 16 bytes wide, in registers: its source rows become target columns. Interleaving row k with row
 * k + N/2 is one perfect shuffle of the whole square, and log2(N) perfect shuffles of N * N elements transpose it.
 */
#ifdef __SSE2__
#define DEFINE_TRANSPOSE(SIZE, BITS, ROUNDS)                                                                               \
    static int transpose_##SIZE(char *target, int64_t target_stride, const char *source, int64_t source_stride) {         \
        enum { N = 16 / SIZE };                                                                                           \
        __m128i rows[N], mixed[N];                                                                                        \
        for (int k = 0; k < N; k++) {                                                                                     \
            rows[k] = _mm_loadu_si128((const __m128i *)(source + k * source_stride));                                     \
        }                                                                                                                 \
        for (int round = 0; round < ROUNDS; round++) {                                                                    \
            for (int k = 0; k < N / 2; k++) {                                                                             \
                mixed[2 * k] = _mm_unpacklo_epi##BITS(rows[k], rows[k + N / 2]);                                          \
                mixed[2 * k + 1] = _mm_unpackhi_epi##BITS(rows[k], rows[k + N / 2]);                                      \
            }                                                                                                             \
            memcpy(rows, mixed, sizeof rows);                                                                             \
        }                                                                                                                 \
        for (int k = 0; k < N; k++) {                                                                                     \
            _mm_storeu_si128((__m128i *)(target + k * target_stride), rows[k]);                                           \
        }                                                                                                                 \
        return 1;                                                                                                         \
    }
DEFINE_TRANSPOSE(1, 8, 4)
DEFINE_TRANSPOSE(2, 16, 3)
DEFINE_TRANSPOSE(4, 32, 2)
DEFINE_TRANSPOSE(8, 64, 1)
#else
#define transpose_1(...) 0
#define transpose_2(...) 0
#define transpose_4(...) 0
#define transpose_8(...) 0
#endif
#define transpose_16(...) 0 /* one element is a whole register: nothing to interleave */

/* Two nested dimensions of runs whose size is known to the compiler, so that memcpy becomes one move. Tiles are a cache
 * line wide: when the two sides disagree on which dimension is the near one (a transpose), every line of a tile
 * is used up before it leaves the cache.
 *
 *     source  |--line--|              target  |--line--|
 *       y = 0  x0 x1 x2 ...             x = 0  y0 y1 y2 ...        near in the source: outer (x)
 *       y = 1  x0 x1 x2 ...             x = 1  y0 y1 y2 ...        near in the target: inner (y)
 */
#define DEFINE_COPY_SQUARE(SIZE)                                                                                          \
    static void copy_square_##SIZE(char *target, const char *source, Dim outer, Dim inner) {                              \
        for (int64_t x = 0; x < outer.extent; x++) {                                                                      \
            char *to = target + x * outer.target_stride;                                                                  \
            const char *from = source + x * outer.source_stride;                                                          \
            for (int64_t y = 0; y < inner.extent; y++) {                                                                  \
                memcpy(to + y * inner.target_stride, from + y * inner.source_stride, SIZE);                               \
            }                                                                                                             \
        }                                                                                                                 \
    }

#define DEFINE_COPY_PLANE(SIZE)                                                                                           \
    DEFINE_COPY_SQUARE(SIZE)                                                                                              \
                                                                                                                          \
    static void copy_tile_##SIZE(char *target, const char *source, Dim outer, Dim inner, int touching) {                  \
        enum { N = 16 / SIZE };                                                                                           \
        for (int64_t x = 0; x < outer.extent; x += N) {                                                                   \
            for (int64_t y = 0; y < inner.extent; y += N) {                                                               \
                char *to = target + x * outer.target_stride + y * inner.target_stride;                                    \
                const char *from = source + x * outer.source_stride + y * inner.source_stride;                            \
                Dim high = {smaller(N, outer.extent - x), outer.target_stride, outer.source_stride};                      \
                Dim wide = {smaller(N, inner.extent - y), inner.target_stride, inner.source_stride};                      \
                int whole = touching && high.extent == N && wide.extent == N;                                             \
                if (!whole || !transpose_##SIZE(to, outer.target_stride, from, inner.source_stride)) {                    \
                    copy_square_##SIZE(to, from, high, wide);                                                             \
                }                                                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
    }                                                                                                                     \
                                                                                                                          \
    static void copy_plane_##SIZE(char *target, const char *source, Dim outer, Dim inner) {                               \
        enum { TILE = LINE_BYTES / SIZE };                                                                                \
        if (inner.source_stride <= outer.source_stride) {                                                                 \
            copy_square_##SIZE(target, source, outer, inner);                                                             \
            return;                                                                                                       \
        }                                                                                                                 \
        int touching = inner.target_stride == SIZE && outer.source_stride == SIZE;                                        \
        for (int64_t x = 0; x < outer.extent; x += TILE) {                                                                \
            for (int64_t y = 0; y < inner.extent; y += TILE) {                                                            \
                Dim high = {smaller(TILE, outer.extent - x), outer.target_stride, outer.source_stride};                   \
                Dim wide = {smaller(TILE, inner.extent - y), inner.target_stride, inner.source_stride};                   \
                copy_tile_##SIZE(target + x * outer.target_stride + y * inner.target_stride,                              \
                                 source + x * outer.source_stride + y * inner.source_stride, high, wide, touching);       \
            }                                                                                                             \
        }                                                                                                                 \
    }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

DEFINE_COPY_PLANE(1)
DEFINE_COPY_PLANE(2)
DEFINE_COPY_PLANE(4)
DEFINE_COPY_PLANE(8)
DEFINE_COPY_PLANE(16)
DEFINE_COPY_SQUARE(32)
DEFINE_COPY_SQUARE(64)

static void copy_plane_any(char *target, const char *source, Dim outer, Dim inner, int64_t run) {
    for (int64_t x = 0; x < outer.extent; x++) {
        char *to = target + x * outer.target_stride;
        const char *from = source + x * outer.source_stride;
        for (int64_t y = 0; y < inner.extent; y++) {
            memcpy(to, from, (size_t)run);
            to += inner.target_stride;
            from += inner.source_stride;
        }
    }
}

static void copy_plane(char *target, const char *source, Dim outer, Dim inner, int64_t run) {
    switch (run) {
        case 1: copy_plane_1(target, source, outer, inner); return;
        case 2: copy_plane_2(target, source, outer, inner); return;
        case 4: copy_plane_4(target, source, outer, inner); return;
        case 8: copy_plane_8(target, source, outer, inner); return;
        case 16: copy_plane_16(target, source, outer, inner); return;
        case 32: copy_square_32(target, source, outer, inner); return;
        case 64: copy_square_64(target, source, outer, inner); return;
        default: copy_plane_any(target, source, outer, inner, run);
    }
}

/* All loops but the last two by recursion, those as one plane. */
static void copy_box(char *target, const char *source, const Dim *dims, Py_ssize_t ndim, int64_t run) {
    if (ndim == 2) {
        copy_plane(target, source, dims[0], dims[1], run);
        return;
    }
    for (int64_t i = 0; i < dims[0].extent; i++) {
        copy_box(target + i * dims[0].target_stride, source + i * dims[0].source_stride, dims + 1, ndim - 1, run);
    }
}

/* An item's loops, from the far to the near one, and what the innermost of them copies. */
typedef struct {
    Dim dims[DIMS_MAX];
    Py_ssize_t ndim;
    int64_t run;
} Loops;

static void move_dim(Dim *dims, Py_ssize_t from, Py_ssize_t to) {
    Dim moved = dims[from];
    for (Py_ssize_t d = from; d > to; d--) {
        dims[d] = dims[d - 1];
    }
    for (Py_ssize_t d = from; d < to; d++) {
        dims[d] = dims[d + 1];
    }
    dims[to] = moved;
}

/* Rows are a dimension like any other: some engines store a page's tokens next to each other, element by element. Which
 * loop is outside of which is free, so what is near in the target is written last, what then touches on both sides is
 * one run, and what is near in the source stands beside the last loop, to make the plane with it:
 *
 *     K of a CPU's page [head, dim, token] to [token, head, dim]      head ─ token ─ dim     a transpose of (token, dim)
 *     ... to another such page                                        head ─ dim             runs of the piece's tokens
 */
static Loops arrange(int64_t rows, Dim row, const Dim *dims, Py_ssize_t ndim, int64_t run) {
    Loops loops = {.ndim = 0, .run = run};
    row.extent = rows;
    for (Py_ssize_t d = -1; d < ndim; d++) {
        Dim next = d < 0 ? row : dims[d];
        if (next.extent == 1) { /* says nothing */
            continue;
        }
        Py_ssize_t place = loops.ndim;
        while (place > 0 && loops.dims[place - 1].target_stride < next.target_stride) {
            place--;
        }
        loops.dims[loops.ndim] = next;
        move_dim(loops.dims, loops.ndim++, place);
    }
    while (loops.ndim > 0) {
        Dim last = loops.dims[loops.ndim - 1];
        if (last.target_stride != loops.run || last.source_stride != loops.run) {
            break;
        }
        loops.run *= last.extent;
        loops.ndim--;
    }
    Py_ssize_t near = loops.ndim - 1;
    for (Py_ssize_t d = 0; d < loops.ndim; d++) {
        near = loops.dims[d].source_stride < loops.dims[near].source_stride ? d : near;
    }
    if (near < loops.ndim - 2) {
        move_dim(loops.dims, near, loops.ndim - 2);
    }
    for (; loops.ndim < 2; loops.ndim++) {
        loops.dims[loops.ndim] = (Dim){1, 0, 0};
        move_dim(loops.dims, loops.ndim, 0);
    }
    return loops;
}

/* Scattered short runs wait for memory, not for instructions: ask for the first lines of an item well before its turn.
 * Past a few lines the processor's own prefetcher has seen the direction. */
static void prefetch_item(const char *target, const char *source, int64_t reach) {
    for (int64_t line = 0; line < reach; line += LINE_BYTES) {
        __builtin_prefetch(source + line, 0, 3);
        __builtin_prefetch(target + line, 1, 3);
    }
}

static void move_boxes(char *target, const char *source, const Ints *ints, Dim row, const Dim *dims, Py_ssize_t ndim, int64_t run) {
    int64_t arranged = 0; /* for so many rows */
    Loops loops = {.ndim = 0};
    for (Py_ssize_t i = 0; i < ints[0].count; i++) {
        int64_t rows = ints[2].values[i];
        if (rows == 0) { /* its offsets were not checked */
            continue;
        }
        if (rows != arranged) {
            loops = arrange(rows, row, dims, ndim, run);
            arranged = rows;
        }
        if (i + PREFETCH_ITEMS < ints[0].count) {
            int64_t reach = smaller(loops.run, PREFETCH_BYTES);
            prefetch_item(target + ints[0].values[i + PREFETCH_ITEMS], source + ints[1].values[i + PREFETCH_ITEMS], reach);
        }
        copy_box(target + ints[0].values[i], source + ints[1].values[i], loops.dims, loops.ndim, loops.run);
    }
}

/* ---- the module ----------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(copy_boxes_doc,
             "copy_boxes(target, source, target_offsets, source_offsets, rows, target_row_stride, source_row_stride, shape,"
             " target_strides, source_strides, run_bytes)\n--\n\nCopy one box per offset, rows[i] times; see _native.pyi.");

static PyObject *copy_boxes(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"target", "source", "target_offsets", "source_offsets", "rows", "target_row_stride",
                            "source_row_stride", "shape", "target_strides", "source_strides", "run_bytes", NULL};
    Py_buffer target, source;
    PyObject *objects[3], *shape, *target_strides, *source_strides;
    Py_ssize_t target_row_stride, source_row_stride, run, ndim;
    Ints ints[3] = {{.name = "target_offsets"}, {.name = "source_offsets"}, {.name = "rows"}};
    Dim dims[SHAPE_DIMS_MAX];
    int64_t total = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*y*OOOnnOOOn:copy_boxes", names, &target, &source, &objects[0], &objects[1],
                                     &objects[2], &target_row_stride, &source_row_stride, &shape, &target_strides,
                                     &source_strides, &run)) {
        return NULL;
    }
    if (target_row_stride < 0 || source_row_stride < 0 || run < 1) {
        PyErr_Format(PyExc_ValueError, "row strides %zd, %zd must not be negative and run_bytes %zd must be at least 1",
                     target_row_stride, source_row_stride, run);
    } else if (read_dims(shape, target_strides, source_strides, dims, &ndim) == 0 && hold_all_ints(objects, ints, 3) == 0) {
        Dim row = {0, target_row_stride, source_row_stride};
        total = check_boxes(ints, row, dims, ndim, run, target.len, source.len);
        if (total > 0) {
            Py_BEGIN_ALLOW_THREADS
            move_boxes(target.buf, source.buf, ints, row, dims, ndim, run);
            Py_END_ALLOW_THREADS
        }
        release_ints(ints, 3);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return total < 0 ? NULL : PyLong_FromLongLong(total);
}

static int64_t check_runs(const Ints *ints, int64_t target_length, int64_t source_length) {
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < ints[0].count; i++) {
        int64_t length = ints[2].values[i];
        if (length < 0) {
            PyErr_Format(PyExc_ValueError, "lengths[%zd] is %lld; it must not be negative", i, (long long)length);
            return -1;
        }
        if (!is_inside(ints[0].values[i], 1, 0, length, target_length)) {
            return refuse_outside(&ints[0], i, "target", 1, target_length);
        }
        if (!is_inside(ints[1].values[i], 1, 0, length, source_length)) {
            return refuse_outside(&ints[1], i, "source", 1, source_length);
        }
        if (__builtin_add_overflow(total, length, &total)) {
            PyErr_Format(PyExc_ValueError, "the bytes moved up to lengths[%zd] do not fit in 64 bits", i);
            return -1;
        }
    }
    return total;
}

PyDoc_STRVAR(copy_runs_doc, "copy_runs(target, source, target_offsets, source_offsets, lengths)\n--\n\n"
                            "Copy runs of any lengths with one memcpy each; see _native.pyi.");

static PyObject *copy_runs(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"target", "source", "target_offsets", "source_offsets", "lengths", NULL};
    Py_buffer target, source;
    PyObject *objects[3];
    Ints ints[3] = {{.name = "target_offsets"}, {.name = "source_offsets"}, {.name = "lengths"}};
    int64_t total = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*y*OOO:copy_runs", names, &target, &source, &objects[0], &objects[1],
                                     &objects[2])) {
        return NULL;
    }
    if (hold_all_ints(objects, ints, 3) == 0) {
        total = check_runs(ints, target.len, source.len);
        if (total > 0) {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t i = 0; i < ints[0].count; i++) {
                memcpy((char *)target.buf + ints[0].values[i], (const char *)source.buf + ints[1].values[i],
                       (size_t)ints[2].values[i]);
            }
            Py_END_ALLOW_THREADS
        }
        release_ints(ints, 3);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return total < 0 ? NULL : PyLong_FromLongLong(total);
}

/* ---- runs of many buffers, with a digest ---------------------------------------------------------------------- */

/* Runs of one pair of buffers; without a target they are only read. */
typedef struct {
    Py_buffer target, source;
    Ints ints[3];
    int64_t target_base, source_base;
} Part;

static void release_parts(Part *parts, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        release_ints(parts[i].ints, 3);
        if (parts[i].target.obj != NULL) {
            PyBuffer_Release(&parts[i].target);
        }
        if (parts[i].source.obj != NULL) {
            PyBuffer_Release(&parts[i].source);
        }
    }
    PyMem_Free(parts);
}

/* Check one part's runs; returns their bytes or -1. */
static int64_t check_part(const Part *part) {
    int64_t total = 0;
    int writes = part->target.obj != NULL;
    if (part->source_base < 0 || part->target_base < 0 || part->source_base > part->source.len ||
        (writes && part->target_base > part->target.len)) {
        PyErr_Format(PyExc_ValueError, "bases %lld, %lld leave the buffers", (long long)part->target_base, (long long)part->source_base);
        return -1;
    }
    int64_t source_length = part->source.len - part->source_base, target_length = writes ? part->target.len - part->target_base : 0;
    for (Py_ssize_t i = 0; i < part->ints[1].count; i++) {
        int64_t length = part->ints[2].values[i];
        if (length < 0) {
            PyErr_Format(PyExc_ValueError, "lengths[%zd] is %lld; it must not be negative", i, (long long)length);
            return -1;
        }
        if (!is_inside(part->ints[1].values[i], 1, 0, length, source_length)) {
            return refuse_outside(&part->ints[1], i, "source", 1, source_length);
        }
        if (writes && !is_inside(part->ints[0].values[i], 1, 0, length, target_length)) {
            return refuse_outside(&part->ints[0], i, "target", 1, target_length);
        }
        if (__builtin_add_overflow(total, length, &total)) {
            PyErr_Format(PyExc_ValueError, "the bytes moved up to lengths[%zd] do not fit in 64 bits", i);
            return -1;
        }
    }
    return total;
}

/* (target, target_base, target_offsets, source, source_base, source_offsets, lengths), or without the first three. */
static int64_t hold_part(PyObject *item, Part *part, int writes) {
    PyObject *objects[3] = {NULL, NULL, NULL};
    Py_ssize_t target_base = 0, source_base = 0;
    part->ints[0].name = "target_offsets";
    part->ints[1].name = "source_offsets";
    part->ints[2].name = "lengths";
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "a part must be a tuple, not %.100s", Py_TYPE(item)->tp_name);
        return -1;
    }
    int parsed = writes ? PyArg_ParseTuple(item, "w*nOy*nOO:part", &part->target, &target_base, &objects[0], &part->source,
                                           &source_base, &objects[1], &objects[2])
                        : PyArg_ParseTuple(item, "y*nOO:part", &part->source, &source_base, &objects[1], &objects[2]);
    if (!parsed) { /* what was held is released by PyArg_ParseTuple */
        part->target.obj = part->source.obj = NULL;
        return -1;
    }
    part->target_base = target_base;
    part->source_base = source_base;
    if (hold_all_ints(writes ? objects : objects + 1, writes ? part->ints : part->ints + 1, writes ? 3 : 2) < 0) {
        return -1;
    }
    return check_part(part);
}

/* Hold and check all parts of a sequence; returns their bytes or -1 with nothing held. */
static int64_t hold_parts(PyObject *sequence, int writes, Part **parts, Py_ssize_t *count) {
    PyObject *items = PySequence_Fast(sequence, "parts must be a sequence");
    if (items == NULL) {
        return -1;
    }
    int64_t total = 0;
    *count = PySequence_Fast_GET_SIZE(items);
    *parts = PyMem_Calloc((size_t)*count + 1, sizeof(Part));
    if (*parts == NULL) {
        PyErr_NoMemory();
        total = -1;
    }
    for (Py_ssize_t i = 0; i < *count && total >= 0; i++) {
        int64_t nbytes = hold_part(PySequence_Fast_GET_ITEM(items, i), &(*parts)[i], writes);
        if (nbytes < 0 || __builtin_add_overflow(total, nbytes, &total)) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "the bytes of all parts do not fit in 64 bits");
            }
            total = -1;
        }
    }
    Py_DECREF(items);
    if (total < 0 && *parts != NULL) {
        release_parts(*parts, *count);
    }
    return total;
}

/* Where a walk over the runs of all parts stands. */
typedef struct {
    const Part *parts;
    Py_ssize_t count, part, run;
    int64_t within; /* bytes of the run that are behind */
} Walk;

/* Up to PIECE_BYTES of one run; ``target`` is NULL in parts that only read. */
typedef struct {
    char *target;
    const char *source;
    int64_t nbytes;
} Piece;

/* The next piece of the walk; of 0 bytes at its end. */
static Piece next_piece(Walk *walk) {
    while (walk->part < walk->count) {
        const Part *part = &walk->parts[walk->part];
        if (walk->run == part->ints[1].count) {
            walk->part++;
            walk->run = 0;
            continue;
        }
        int64_t left = part->ints[2].values[walk->run] - walk->within;
        Piece piece = {NULL, (const char *)part->source.buf + part->source_base + part->ints[1].values[walk->run] + walk->within,
                       smaller(left, PIECE_BYTES)};
        if (part->target.obj != NULL) {
            piece.target = (char *)part->target.buf + part->target_base + part->ints[0].values[walk->run] + walk->within;
        }
        walk->within += piece.nbytes;
        if (piece.nbytes == left) {
            walk->run++;
            walk->within = 0;
        }
        if (piece.nbytes > 0) {
            return piece;
        }
    }
    return (Piece){NULL, NULL, 0};
}

/* Copy (where there is a target) and digest, piece by piece. The digest is of what the target's own memory then holds:
 *
 *     copied    |--- piece 0 ---|               |--- piece 1 ---|
 *     read back                 |--- piece 0 ---|               |--- piece 1 ---|
 *     asked for                 |--- piece 1 ---|               |--- piece 2 ---|      from source and target
 */
static void walk_and_digest(const Part *parts, Py_ssize_t count, Xxh3 *state) {
    Walk walk = {parts, count, 0, 0, 0};
    Piece piece = next_piece(&walk);
    while (piece.nbytes > 0) {
        Piece next = next_piece(&walk);
        Ahead ahead = {NULL, NULL};
        if (next.nbytes >= piece.nbytes) {
            ahead = (Ahead){next.source, next.target};
        }
        if (piece.target != NULL) {
            memcpy(piece.target, piece.source, (size_t)piece.nbytes);
        }
        xxh3_add(state, piece.target != NULL ? piece.target : piece.source, piece.nbytes, ahead);
        piece = next;
    }
}

static void copy_plainly(char *target, const char *source, int64_t nbytes) { memcpy(target, source, (size_t)nbytes); }

/* Copy past the caches, which ``nbytes`` would not fit into anyhow: the target's lines need not be read first, which
 * leaves two thirds of the memory traffic. */
static void copy_past_caches(char *target, const char *source, int64_t nbytes) {
#ifdef __SSE2__
    int64_t whole = (uintptr_t)target % 16 == 0 ? nbytes / 64 * 64 : 0;
    for (int64_t i = 0; i < whole; i += 64) {
        for (int k = 0; k < 64; k += 16) {
            _mm_stream_si128((__m128i *)(target + i + k), _mm_loadu_si128((const __m128i *)(source + i + k)));
        }
    }
    memcpy(target + whole, source + whole, (size_t)(nbytes - whole));
#else
    memcpy(target, source, (size_t)nbytes);
#endif
}

static void copy_all(const Part *parts, Py_ssize_t count, int64_t total) {
    void (*copy)(char *, const char *, int64_t) = total >= PAST_CACHES_BYTES ? copy_past_caches : copy_plainly;
    for (Py_ssize_t p = 0; p < count; p++) {
        const Part *part = &parts[p];
        char *target = (char *)part->target.buf + part->target_base;
        const char *source = (const char *)part->source.buf + part->source_base;
        for (Py_ssize_t i = 0; i < part->ints[1].count; i++) {
            copy(target + part->ints[0].values[i], source + part->ints[1].values[i], part->ints[2].values[i]);
        }
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Read a seed, or None: 1 when there is one, 0 when not, -1 on error. */
static int read_seed(PyObject *object, int64_t total, uint64_t *seed) {
    if (object == Py_None) {
        return 0;
    }
    *seed = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (total <= XXH3_SHORT_BYTES) {
        PyErr_Format(PyExc_ValueError, "a digest here is of more than %d bytes, not of %lld", XXH3_SHORT_BYTES, (long long)total);
        return -1;
    }
    return 1;
}

static PyObject *run_parts(PyObject *args, PyObject *kwargs, int writes) {
    static char *names[] = {"parts", "seed", NULL};
    PyObject *sequence, *seed_object = Py_None, *answer = NULL;
    Part *parts;
    Py_ssize_t count;
    Xxh3 state;
    unsigned char digest[16];
    uint64_t seed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, writes ? "O|O:copy_parts" : "OO:digest_parts", names, &sequence, &seed_object)) {
        return NULL;
    }
    int64_t total = hold_parts(sequence, writes, &parts, &count);
    if (total < 0) {
        return NULL;
    }
    int digests = read_seed(seed_object, total, &seed);
    if (digests == 0 && !writes) {
        PyErr_SetString(PyExc_TypeError, "digest_parts needs a seed");
        digests = -1;
    }
    if (digests >= 0) {
        Py_BEGIN_ALLOW_THREADS
        if (digests) {
            xxh3_begin(&state, seed, total);
            walk_and_digest(parts, count, &state);
            xxh3_end(&state, digest);
        } else {
            copy_all(parts, count, total);
        }
        Py_END_ALLOW_THREADS
        answer = digests ? PyBytes_FromStringAndSize((const char *)digest, 16) : Py_NewRef(Py_None);
    }
    release_parts(parts, count);
    return answer;
}

PyDoc_STRVAR(copy_parts_doc, "copy_parts(parts, seed=None)\n--\n\nCopy runs between several buffers; see _native.pyi.");

static PyObject *copy_parts(PyObject *module, PyObject *args, PyObject *kwargs) { return run_parts(args, kwargs, 1); }

PyDoc_STRVAR(digest_parts_doc, "digest_parts(parts, seed)\n--\n\nDigest runs where they lie; see _native.pyi.");

static PyObject *digest_parts(PyObject *module, PyObject *args, PyObject *kwargs) { return run_parts(args, kwargs, 0); }

static PyMethodDef methods[] = {
    {"copy_boxes", (PyCFunction)(void (*)(void))copy_boxes, METH_VARARGS | METH_KEYWORDS, copy_boxes_doc},
    {"copy_parts", (PyCFunction)(void (*)(void))copy_parts, METH_VARARGS | METH_KEYWORDS, copy_parts_doc},
    {"copy_runs", (PyCFunction)(void (*)(void))copy_runs, METH_VARARGS | METH_KEYWORDS, copy_runs_doc},
    {"digest_parts", (PyCFunction)(void (*)(void))digest_parts, METH_VARARGS | METH_KEYWORDS, digest_parts_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pdxfer._native",
    .m_doc = "Scattered copies between byte buffers; see _native.pyi.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&definition);
}
