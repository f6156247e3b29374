// Serves the ops of csrc to another process: calls come by standard input, results go by standard output.
//
// Numbers are 64 bits wide and little-endian, as on both processors. A call is the op's name, the number of threads,
// the memory of its tensors, and its arguments. The answer is a message, empty if all is well, and that memory.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/stable/library.h>

namespace crate_kernels {
// As csrc/common/plan.h declares it; there are no plans here.
torch::stable::Op offer(const char*, torch::stable::Op kernel) {
  return kernel;
}
}  // namespace crate_kernels

namespace torch::stable {
namespace {
int64_t threads = 1;
}

int64_t get_num_threads() {
  return threads;
}

void parallel_for(int64_t begin, int64_t end, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t parts = std::min(threads, end - begin);
  std::vector<std::thread> others;
  const auto start = [&](int64_t part) { return begin + (end - begin) * part / parts; };
  for (int64_t part = 1; part < parts; ++part) others.emplace_back([&, part] { body(start(part), start(part + 1)); });
  if (parts > 0) body(begin, start(1));
  for (std::thread& other : others) other.join();
}

}  // namespace torch::stable

namespace {

using torch::stable::ScalarType;
using torch::stable::Tensor;
using torch::stable::Value;

void read(void* data, size_t bytes) {
  if (bytes > 0 && std::fread(data, 1, bytes, stdin) != bytes) std::exit(std::feof(stdin) ? 0 : 1);
}
template <class T>
T read() {
  T value;
  read(&value, sizeof value);
  return value;
}
std::string read_text() {
  std::string text(read<int64_t>(), '\0');
  read(text.data(), text.size());
  return text;
}
std::vector<int64_t> read_numbers(int64_t count) {
  std::vector<int64_t> numbers(count);
  read(numbers.data(), count * sizeof(int64_t));
  return numbers;
}
void write(const void* data, size_t bytes) {
  std::fwrite(data, 1, bytes, stdout);
}

struct Memory {
  std::shared_ptr<char> data;
  int64_t bytes;
};

Value read_argument(const std::vector<Memory>& memory) {
  switch (read<char>()) {
    case 'b':
      return read<int64_t>() != 0;
    case 'i':
      return read<int64_t>();
    case 'd':
      return read<double>();
    case 't': {
      const auto [dtype, place, offset, dim] = read<std::array<int64_t, 4>>();
      std::vector<int64_t> sizes = read_numbers(dim), strides = read_numbers(dim);
      const std::shared_ptr<char>& whole = memory[place].data;
      return Tensor(static_cast<ScalarType>(dtype), std::move(sizes), std::move(strides),
                    std::shared_ptr<char>(whole, whole.get() + offset));
    }
    default:
      return {};
  }
}

}  // namespace

int main() {
  for (;;) {
    const std::string name = read_text();
    torch::stable::threads = read<int64_t>();
    std::vector<Memory> memory(read<int64_t>());
    for (Memory& m : memory) {
      m.bytes = read<int64_t>();
      m.data.reset(new char[m.bytes + 1], std::default_delete<char[]>());
      read(m.data.get(), m.bytes);
    }
    std::vector<Value> arguments(read<int64_t>());
    std::vector<StableIValue> stack;
    for (Value& argument : arguments) {
      argument = read_argument(memory);
      stack.push_back(reinterpret_cast<StableIValue>(&argument));
    }
    std::string message;
    try {
      torch::stable::ops().at(name)(stack.data(), stack.size(), 0);
    } catch (const std::exception& error) {
      message = error.what();
    }
    const int64_t length = static_cast<int64_t>(message.size());
    write(&length, sizeof length);
    write(message.data(), message.size());
    for (const Memory& m : memory) write(m.data.get(), m.bytes);
    std::fflush(stdout);
  }
}
