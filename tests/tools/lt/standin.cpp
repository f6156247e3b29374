// Stands in for cuBLASLt on CPU tensors of bfloat16: as much of it as csrc/common/lt.cpp calls, by columns as it is.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct Operation {
  int compute, scale, transposed;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Preference {
  uint64_t workspace;
  uint32_t reductions, alignment[4];
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

float widened(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float at(const void* from, const Layout& l, uint64_t row, uint64_t column) {
  return widened(static_cast<const uint16_t*>(from)[row + column * l.stride]);
}

}  // namespace

extern "C" {

// What it was asked, and what it answers: a status of creation, of the search and of a product.
int created, searched, multiplied, create_status, search_status, multiply_status;
Preference asked;

int cublasLtCreate(void** handle) {
  *handle = &created;
  ++created;
  return create_status;
}

int cublasLtMatmulDescCreate(void** operation, int compute, int scale) {
  *operation = new Operation{compute, scale, 0};
  return compute == 68 && scale == 0 ? 0 : 7;
}

int cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value, size_t size) {
  if (attribute != 3 || size != 4) return 7;
  std::memcpy(&static_cast<Operation*>(operation)->transposed, value, size);
  return 0;
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *layout = new Layout{type, rows, columns, stride};
  return type == 14 ? 0 : 15;
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
  const uint64_t inner = o.transposed ? la.rows : la.columns;
  if (algorithm[7] != 8 || bytes < 4096 || of_c != of_d || lb.rows != inner) return 7;
  if ((o.transposed ? la.columns : la.rows) != ld.rows || lb.columns != ld.columns) return 7;
  std::memset(workspace, 0xFF, bytes);
  for (uint64_t column = 0; column < ld.columns; ++column) {
    for (uint64_t row = 0; row < ld.rows; ++row) {
      float sum = 0.0f;
      for (uint64_t k = 0; k < inner; ++k) {
        sum += (o.transposed ? at(a, la, k, row) : at(a, la, row, k)) * at(b, lb, k, column);
      }
      const float added = *static_cast<const float*>(beta) * at(c, ld, row, column);
      static_cast<uint16_t*>(d)[row + column * ld.stride] = rounded(*static_cast<const float*>(alpha) * sum + added);
    }
  }
  ++multiplied;
  return multiply_status;
}

}  // extern "C"
