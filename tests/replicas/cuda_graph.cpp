// torch._C._CUDAGraph as PyTorch binds it (torch/csrc/cuda/Graph.cpp, aten/src/ATen/cuda/CUDAGraph.cpp), without CUDA.
// What was taken from there: the constructor's one argument and its default are pybind's, so whatever `__new__` is
// given, `__init__` decides; the raw graph outlives capture_end only where it is kept; the checks and their order.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace py = pybind11;

class CUDAGraph {
  public:
    explicit CUDAGraph(bool keep_graph = false) : keep_graph_(keep_graph) {}
    void capture_begin(py::object, const char*, bool) {
        if (has_graph_exec_) throw std::runtime_error("This CUDAGraph instance already owns a captured graph.");
    }
    void capture_end() {
        has_graph_ = capture_ended_ = true;
        if (!keep_graph_) {
            instantiate();
            has_graph_ = false;  // cudaGraphDestroy
        }
    }
    // From PyTorch 2.14 on, Python's capture_end calls these two, and instantiates between them.
    void capture_end_pre() { has_graph_ = capture_ended_ = true; }
    void capture_end_post() { has_graph_ = keep_graph_; }
    bool has_graph_exec() const { return has_graph_exec_; }
    void instantiate() {
        if (!capture_ended_) throw std::runtime_error("capture_end() must have been called before calling instantiate");
        has_graph_exec_ = true;
    }
    void replay() {
        if (!capture_ended_) throw std::runtime_error("Called CUDAGraph::replay without a preceding successful capture.");
        if (!has_graph_exec_) instantiate();
    }
    std::uintptr_t raw_cuda_graph() {
        if (!keep_graph_)
            throw std::runtime_error("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized "
                                     "with keep_graph=true");
        if (!has_graph_) throw std::runtime_error("You cannot access the raw cudaGraph_t instance until capture_end()");
        return reinterpret_cast<std::uintptr_t>(this);
    }

  private:
    bool keep_graph_, has_graph_ = false, has_graph_exec_ = false, capture_ended_ = false;
};

PYBIND11_MODULE(cuda_graph, m) {
    py::class_<CUDAGraph, std::shared_ptr<CUDAGraph>>(m, "_CUDAGraph")
        .def(py::init<bool>(), py::arg("keep_graph") = false)
        .def("capture_begin", &CUDAGraph::capture_begin, py::arg("pool") = py::none(),
             py::arg("capture_error_mode") = "global", py::arg("check_input_liveness") = false)
        .def("capture_end", &CUDAGraph::capture_end)
        .def("capture_end_pre", &CUDAGraph::capture_end_pre)
        .def("capture_end_post", &CUDAGraph::capture_end_post)
        .def_property_readonly("_has_graph_exec", &CUDAGraph::has_graph_exec)
        .def("instantiate", &CUDAGraph::instantiate)
        .def("replay", &CUDAGraph::replay)
        .def("raw_cuda_graph", &CUDAGraph::raw_cuda_graph);
}
