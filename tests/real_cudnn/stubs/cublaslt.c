/* libcublasLt.so.13 that can take every matrix multiplication, with one algorithm that needs no workspace. So cuDNN offers its
   engine 0, which stands on this library, everywhere; what the engine asks for above that is cuDNN's own. Nothing is multiplied. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 15, ATTRIBUTES = 256, LARGEST = 64 };

size_t cublasLtGetVersion(void) { return 130401; }
size_t cublasLtGetCudartVersion(void) { return 13020; }
int cublasLtGetProperty(int which, int *value) { *value = which == 0 ? 13 : which == 1 ? 4 : 1; return SUCCESS; }
int cublasLtCreate(void **handle) { *handle = (void *)1; return SUCCESS; }
int cublasLtDestroy(void *handle) { return SUCCESS; }

/* What a caller has set is what it gets: one table of attributes for descriptors, layouts, preferences and transforms alike. */
typedef struct { unsigned char value[ATTRIBUTES][LARGEST]; } Object;

static int make(void **object) { *object = calloc(1, sizeof(Object)); return SUCCESS; }
static int drop(void *object) { free(object); return SUCCESS; }
static int set(Object *object, int attribute, const void *value, size_t size) {
    if (attribute >= 0 && attribute < ATTRIBUTES && size <= LARGEST) memcpy(object->value[attribute], value, size);
    return SUCCESS;
}
static int get(Object *object, int attribute, void *value, size_t size, size_t *written) {
    memset(value, 0, size);
    if (attribute >= 0 && attribute < ATTRIBUTES) memcpy(value, object->value[attribute], size < LARGEST ? size : LARGEST);
    if (written) *written = size;
    return SUCCESS;
}

#define KIND(name) \
    int cublasLt##name##Destroy(void *object) { return drop(object); } \
    int cublasLt##name##SetAttribute(void *object, int attribute, const void *value, size_t size) { return set(object, attribute, value, size); } \
    int cublasLt##name##GetAttribute(void *object, int attribute, void *value, size_t size, size_t *written) { return get(object, attribute, value, size, written); }

KIND(MatmulDesc) KIND(MatrixLayout) KIND(MatmulPreference) KIND(MatrixTransformDesc)
int cublasLtMatmulDescCreate(void **object, int compute, int scale) { return make(object); }
int cublasLtMatrixLayoutCreate(void **object, int type, uint64_t rows, uint64_t columns, int64_t stride) { return make(object); }
int cublasLtMatmulPreferenceCreate(void **object) { return make(object); }
int cublasLtMatrixTransformDescCreate(void **object, int scale) { return make(object); }

typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *matmul, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   Result *results, int *found) {
    *found = wanted > 0;
    if (*found) memset(results, 0, sizeof *results), results->waves = 1;
    return *found ? SUCCESS : NOT_SUPPORTED;
}
int cublasLtMatmul(void) { return NOT_SUPPORTED; }
int cublasLtMatrixTransform(void) { return NOT_SUPPORTED; }
