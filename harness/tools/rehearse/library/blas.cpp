// cuBLAS and cuBLASLt: what is multiplied, not the product.
#include "stand_in.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

static std::string name_of(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return "float32";
        case CUDA_R_64F: return "float64";
        case CUDA_R_16F: return "float16";
        case CUDA_R_16BF: return "bfloat16";
        case CUDA_R_8F_E4M3: return "float8_e4m3";
        case CUDA_R_8F_E5M2: return "float8_e5m2";
        case CUDA_R_8I: return "int8";
        default: return "type " + std::to_string(int(type));
    }
}

// Columns of A and B are ours of the second and the first matrix: cuBLAS stores by columns, torch by rows.
static cublasStatus_t multiply(
    const void* stream, long m, long n, long k, long batch, cudaDataType_t a, cudaDataType_t b
) {
    std::string shape = std::to_string(batch) + "\t" + std::to_string(n) + "\t" + std::to_string(k) + "\t" +
                        std::to_string(m);
    record("product\t" + name_of(b) + "\t" + name_of(a) + "\t" + shape, 2.0 * m * n * k * batch, stream);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = (cublasHandle_t)opaque();
    cublasSetStream(*handle, nullptr);
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    ::operator delete(handle);
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}
// A handle holds its stream.
EXPORT cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    *(cudaStream_t*)handle = stream;
    return CUBLAS_STATUS_SUCCESS;
}
static const void* stream_of(cublasHandle_t handle) { return *(cudaStream_t*)handle; }
EXPORT cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetPointerMode(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetPointerMode(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*, const void*,
    cudaDataType a, int, const void*, cudaDataType b, int, const void*, void*, cudaDataType, int,
    cublasComputeType_t, cublasGemmAlgo_t
) {
    return multiply(stream_of(handle), m, n, k, 1, a, b);
}
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*, const void*,
    cudaDataType a, int, long long, const void*, cudaDataType b, int, long long, const void*, void*, cudaDataType,
    int, long long, int batch, cublasComputeType_t, cublasGemmAlgo_t
) {
    return multiply(stream_of(handle), m, n, k, batch, a, b);
}
EXPORT cublasStatus_t cublasSgemm(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*, const float*, int,
    const float*, int, const float*, float*, int
) {
    return multiply(stream_of(handle), m, n, k, 1, CUDA_R_32F, CUDA_R_32F);
}
EXPORT cublasStatus_t cublasSgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*, const float*, int,
    long long, const float*, int, long long, const float*, float*, int, long long, int batch
) {
    return multiply(stream_of(handle), m, n, k, batch, CUDA_R_32F, CUDA_R_32F);
}
EXPORT cublasStatus_t cublasDgemm(
    cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const double*, const double*, int,
    const double*, int, const double*, double*, int
) {
    return multiply(stream_of(handle), m, n, k, 1, CUDA_R_64F, CUDA_R_64F);
}
EXPORT cublasStatus_t cublasSgemv(
    cublasHandle_t handle, cublasOperation_t transposed, int m, int n, const float*, const float*, int, const float*, int,
    const float*, float*, int
) {
    bool plain = transposed == CUBLAS_OP_N;
    return multiply(stream_of(handle), plain ? m : n, 1, plain ? n : m, 1, CUDA_R_32F, CUDA_R_32F);
}
EXPORT cublasStatus_t cublasSdot(cublasHandle_t handle, int n, const float*, int, const float*, int, float*) {
    return multiply(stream_of(handle), 1, 1, n, 1, CUDA_R_32F, CUDA_R_32F);
}

// A triangular system of k rows takes half the operations of a product with its matrix.
EXPORT cublasStatus_t cublasStrsmBatched(
    cublasHandle_t handle, cublasSideMode_t side, cublasFillMode_t, cublasOperation_t, cublasDiagType_t, int m, int n,
    const float*, const float* const*, int, float* const*, int, int batch
) {
    return multiply(stream_of(handle), m, n, (side == CUBLAS_SIDE_LEFT ? m : n) / 2, batch, CUDA_R_32F, CUDA_R_32F);
}

// cuBLASLt: shapes are said by descriptors, which are opaque to the caller.

namespace {

struct Operation {
    int32_t transposed_a = CUBLAS_OP_N;
};
struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int32_t batch = 1;
};

}  // namespace

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t* operation, cublasComputeType_t, cudaDataType_t
) {
    *operation = (cublasLtMatmulDesc_t) new Operation;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    delete (Operation*)operation;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes
) {
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&((Operation*)operation)->transposed_a, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t
) {
    *layout = (cublasLtMatrixLayout_t) new Layout{type, rows, columns};
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete (Layout*)layout;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void* value, size_t bytes
) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&((Layout*)layout)->batch, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = (cublasLtMatmulPreference_t)opaque();
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    ::operator delete(preference);
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t
) {
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* results, int* count
) {
    results[0] = {};
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void*, const void*, cublasLtMatrixLayout_t a_layout,
    const void*, cublasLtMatrixLayout_t b_layout, const void*, const void*, cublasLtMatrixLayout_t, void*,
    cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream
) {
    auto a = (Layout*)a_layout, b = (Layout*)b_layout, out = (Layout*)out_layout;
    bool plain = ((Operation*)operation)->transposed_a == CUBLAS_OP_N;
    return multiply(stream, out->rows, out->columns, plain ? a->columns : a->rows, out->batch, a->type, b->type);
}
