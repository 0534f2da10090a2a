// HIP's functions for a machine without it: they write down how they are called. A launch
// adds up the first numbers at all places but the last, and stores the sum there.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static FILE* log_file = std::fopen(std::getenv("JKV_HIP_LOG"), "w");

extern "C" {

int hipModuleLoadData(void** module, const void* code) {
  const char* text = static_cast<const char*>(code);
  std::fprintf(log_file, "load %.4s\n", text + 1);
  std::fflush(log_file);
  *module = strdup(text + 1);
  return *text == '\x7f' ? 0 : 209;
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  std::fprintf(log_file, "find %s in %s\n", name, static_cast<char*>(module));
  *function = strdup(name);
  return 0;
}

int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned threads, unsigned, unsigned,
                          unsigned shared_bytes, void*, void** arguments, void**) {
  int32_t sum = 0, *last = nullptr, *place;
  while ((place = *static_cast<int32_t**>(*arguments++))) {
    if (last) sum += *last;
    last = place;
  }
  *last = sum;
  std::fprintf(log_file, "launch %s %u %u %u by %u with %u\n", (char*)function, grid_x,
               grid_y, grid_z, threads, shared_bytes);
  std::fflush(log_file);
  return 0;
}

const char* hipGetErrorString(int) { return "no binary for this card"; }

}  // extern "C"
