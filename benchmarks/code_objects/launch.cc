// A kernel that is machine code in a program of XLA, launched on an AMD card: XLA's typed
// FFI says where buffers lie, HIP loads the code once for each card and launches it.

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// What is needed of HIP. It is looked for when a kernel is first launched, so that this
// builds without ROCm.
struct Hip {
  const char* missing = nullptr;
  void* library = dlopen(std::getenv("JKV_HIP_LIBRARY") ?: "libamdhip64.so", RTLD_NOW);
  int (*load)(void** module, const void* code) = Find("hipModuleLoadData");
  int (*find)(void** function, void* module, const char*) = Find("hipModuleGetFunction");
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                unsigned threads, unsigned, unsigned, unsigned shared_bytes, void* stream,
                void** arguments, void** extra) = Find("hipModuleLaunchKernel");
  const char* (*describe)(int status) = Find("hipGetErrorString");

  struct Any {
    void* found;
    template <typename Function>
    operator Function() const { return reinterpret_cast<Function>(found); }
  };

  Any Find(const char* name) {
    void* found = library ? dlsym(library, name) : nullptr;
    if (found == nullptr) missing = name;
    return {found};
  }
};

static ffi::Error Launch(void* stream, int32_t device, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, std::string_view name,
                         ffi::Span<const uint8_t> code, ffi::Span<const int32_t> grid,
                         int32_t threads, int32_t shared_bytes, int32_t num_unused) {
  static const Hip& hip = *new Hip();
  static std::mutex& mutex = *new std::mutex();
  static auto& kept = *new std::map<std::tuple<int, std::string, std::string>, void*>();
  if (hip.missing) return ffi::Error::Internal("there is no HIP: " + std::string(hip.missing));

  int status = 0;
  void* function = nullptr;
  const std::string named(name), bytes(code.begin(), code.end());
  {
    std::lock_guard<std::mutex> lock(mutex);
    void*& known = kept[{device, named, bytes}];
    void* module = nullptr;
    if (!known) status = hip.load(&module, bytes.data());
    if (!known && !status) status = hip.find(&known, module, named.c_str());
    function = known;
  }
  // A kernel takes where its operands and then its results lie, and at the end where
  // there is memory that Triton may ask for and these kernels do not.
  std::vector<void*> places, arguments;
  for (size_t i = 0; i < operands.size(); ++i)
    places.push_back(operands.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < results.size(); ++i)
    places.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
  places.resize(places.size() + num_unused, nullptr);
  for (void*& place : places) arguments.push_back(&place);
  if (!status)
    status = hip.launch(function, grid[0], grid[1], grid[2], threads, 1, 1, shared_bytes,
                        stream, arguments.data(), nullptr);
  if (!status) return ffi::Error::Success();
  return ffi::Error::Internal(named + ": " + hip.describe(status));
}

#define REST                                   \
  .RemainingArgs()                             \
      .RemainingRets()                         \
      .Attr<std::string_view>("name")          \
      .Attr<ffi::Span<const uint8_t>>("code")  \
      .Attr<ffi::Span<const int32_t>>("grid")  \
      .Attr<int32_t>("threads")                \
      .Attr<int32_t>("shared_bytes")           \
      .Attr<int32_t>("num_unused")

// No trait lets XLA put it into command buffers, which break on cards of AMD.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JkvLaunch, Launch,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>() REST);

template <typename... Given>
static ffi::Error LaunchHere(Given... given) {
  return Launch(nullptr, 0, given...);
}

// The same for a CPU, which has no streams: with a stand-in of HIP.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JkvLaunchHere,
    (LaunchHere<ffi::RemainingArgs, ffi::RemainingRets, std::string_view,
                ffi::Span<const uint8_t>, ffi::Span<const int32_t>, int32_t, int32_t,
                int32_t>),
    ffi::Ffi::Bind() REST);
