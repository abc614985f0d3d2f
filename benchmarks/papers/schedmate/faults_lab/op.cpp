// A torch operator that fails in C++ as the CUDA runtime and NCCL have torch's operators fail: with the exception class
// of c10 that they throw, and with the text that it is given. The device is stood in for; class, dispatcher, bindings
// and traceback are torch's.
#include <c10/util/Exception.h>
#include <torch/library.h>

at::Tensor strike(const at::Tensor& x, const std::string& kind, const std::string& text) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (kind == "accelerator") throw c10::AcceleratorError(here, 214, text);
  if (kind == "memory") throw c10::OutOfMemoryError(here, text);
  if (kind == "distributed") throw c10::DistBackendError(here, text);
  if (kind == "error") throw c10::Error(here, text);
  return x.clone();
}

TORCH_LIBRARY(stoker_faults, library) { library.def("strike(Tensor x, str kind, str text) -> Tensor"); }
TORCH_LIBRARY_IMPL(stoker_faults, CPU, library) { library.impl("strike", &strike); }
