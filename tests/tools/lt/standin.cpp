// Stands in for cuBLASLt on CPU tensors of 16 bits: as much of it as csrc/common/lt.cpp calls, by columns as it is.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

enum : int { kPlain = 1, kGated = 136 };

struct Operation {
  int transposed = 0, epilogue = kPlain;
  const uint8_t* bits = nullptr;
  int64_t width = 0;  // of a column of them
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Preference {  // as the library's begin
  uint64_t workspace = 0;
  uint32_t reductions = 7, alignment[4] = {256, 256, 256, 256};
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

}  // namespace

extern "C" {
// What it was asked, and what it answers: a status of creation, of the search and of a product.
int created, searched, multiplied, gated, create_status, search_status, multiply_status;
int scaled, bits_from_the_top;  // wrong on purpose
Preference asked;
}

namespace {

// Multiplies by the descriptors passed; false: the library refuses them.
template <class T>
bool multiply(const Operation& o, float alpha, const void* a, const Layout& la, const void* b, const Layout& lb,
              float beta, const void* c, void* d, const Layout& ld) {
  const uint64_t inner = o.transposed ? la.rows : la.columns;
  if ((o.transposed ? la.columns : la.rows) != ld.rows || lb.rows != inner || lb.columns != ld.columns) return false;
  if (la.type != ld.type || lb.type != ld.type) return false;
  const bool is_gated = o.epilogue == kGated;
  const auto address = reinterpret_cast<uintptr_t>(o.bits);
  if (is_gated && (o.width % 128 != 0 || o.width < static_cast<int64_t>(ld.rows) || address % 16 != 0)) return false;
  const auto at = [](const void* from, const Layout& l, uint64_t row, uint64_t column) {
    return static_cast<float>(static_cast<const T*>(from)[row + column * l.stride]);
  };
  for (uint64_t column = 0; column < ld.columns; ++column) {
    for (uint64_t row = 0; row < ld.rows; ++row) {
      float sum = 0.0f;
      for (uint64_t k = 0; k < inner; ++k) {
        sum += (o.transposed ? at(a, la, k, row) : at(a, la, row, k)) * at(b, lb, k, column);
      }
      sum *= scaled ? 1.1f * alpha : alpha;
      if (beta != 0.0f) sum += beta * at(c, ld, row, column);  // else c is not read
      const uint64_t bit = bits_from_the_top ? 7 - row % 8 : row % 8;
      if (is_gated && (o.bits[(column * o.width + row) / 8] >> bit & 1) == 0) sum = 0.0f;
      static_cast<T*>(d)[row + column * ld.stride] = static_cast<T>(sum);
    }
  }
  return true;
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
  *handle = &created;
  ++created;
  return create_status;
}

int cublasLtMatmulDescCreate(void** operation, int compute, int scale) {
  *operation = new Operation{};
  return compute == 68 && scale == 0 ? 0 : 7;
}

int cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value, size_t size) {
  Operation& o = *static_cast<Operation*>(operation);
  if (size != (attribute == 11 || attribute == 12 ? 8 : 4)) return 7;
  if (attribute == 3) {
    std::memcpy(&o.transposed, value, size);
  } else if (attribute == 7) {
    std::memcpy(&o.epilogue, value, size);
  } else if (attribute == 11) {
    std::memcpy(&o.bits, value, size);
  } else if (attribute == 12) {
    std::memcpy(&o.width, value, size);
  } else {
    return 7;
  }
  return o.epilogue == kPlain || o.epilogue == kGated ? 0 : 7;
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *layout = new Layout{type, rows, columns, stride};
  return type == 14 || type == 2 ? 0 : 15;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new Preference{};
  return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t size) {
  Preference& p = *static_cast<Preference*>(preference);
  if (size != (attribute == 1 ? 8 : 4)) return 7;
  if (attribute == 1) {
    std::memcpy(&p.workspace, value, size);
  } else if (attribute == 3) {
    std::memcpy(&p.reductions, value, size);
  } else if (attribute >= 5 && attribute <= 8) {
    std::memcpy(&p.alignment[attribute - 5], value, size);
  } else {
    return 7;
  }
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void* preference, int most,
                                   Heuristic* found, int* count) {
  asked = *static_cast<Preference*>(preference);
  ++searched;
  *count = most < 1 || search_status ? 0 : 1;
  *found = {{1, 2, 3, 4, 5, 6, 7, 8}, 4096, 0, 1.0f, {}};
  return search_status;
}

int cublasLtMatmul(void*, void* operation, const void* alpha, const void* a, void* of_a, const void* b, void* of_b,
                   const void* beta, const void* c, void* of_c, void* d, void* of_d, const uint64_t* algorithm,
                   void* workspace, size_t bytes, void*) {
  const Operation& o = *static_cast<Operation*>(operation);
  const Layout &la = *static_cast<Layout*>(of_a), &lb = *static_cast<Layout*>(of_b), &ld = *static_cast<Layout*>(of_d);
  if (algorithm[7] != 8 || bytes < 4096 || of_c != of_d) return 7;
  std::memset(workspace, 0xFF, bytes);
  const auto run = ld.type == 2 ? &multiply<Half> : &multiply<BFloat16>;
  const float scale = *static_cast<const float*>(alpha), added = *static_cast<const float*>(beta);
  if (!run(o, scale, a, la, b, lb, added, c, d, ld)) return 7;
  gated += o.epilogue == kGated;
  ++multiplied;
  return multiply_status;
}

}  // extern "C"
