// Notices that an optimizer's user replaced a state: opt.state[p] = {...}, opt.state[p]["exp_avg"] = tensor.
//
// A plan holds the tensors that it was made from, so a replaced one would be passed over without a word. Looking
// every state up by its key costs as much as the step itself. Instead the place of each entry in its dict is kept:
// asking PyDict_Next for that place finds the same entry as long as the dict was not rebuilt, in a few nanoseconds,
// and any other answer is an answer too: look again, make a new plan.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <unordered_map>
#include <vector>

namespace apex {
class StateWatch {
 public:
  // The states of these parameters as they are now.
  StateWatch(pybind11::dict states, const std::vector<pybind11::object>& params) : states_(std::move(states)) {
    std::unordered_map<PyObject*, size_t> wanted;
    for (size_t i = 0; i < params.size(); ++i) wanted.emplace(params[i].ptr(), i);
    each(states_, [&](const Entry& entry) {
      if (!wanted.count(entry.key.ptr()) || !PyDict_Check(entry.value.ptr())) return;
      of_param_.push_back(entry);
      each(entry.value, [&](const Entry& state) { states_of_.push_back({of_param_.size() - 1, state}); });
    });
    complete_ = of_param_.size() == wanted.size();
  }

  // Whether all of them, in this dict, are the objects they were.
  bool holds(const pybind11::dict& states) const {
    if (states.ptr() != states_.ptr() || !complete_) return false;
    for (const Entry& entry : of_param_)
      if (!entry.is_in(states_.ptr())) return false;
    for (const State& state : states_of_)
      if (!state.entry.is_in(of_param_[state.row].value.ptr())) return false;
    return true;
  }

 private:
  struct Entry {
    Py_ssize_t place;             // as PyDict_Next takes it
    pybind11::object key, value;  // held, so that no new object can have their address

    bool is_in(PyObject* dict) const {
      Py_ssize_t at = place;
      PyObject *k = nullptr, *v = nullptr;
      return PyDict_Next(dict, &at, &k, &v) && k == key.ptr() && v == value.ptr();
    }
  };
  struct State {
    size_t row;
    Entry entry;
  };
  template <class Function> static void each(const pybind11::object& dict, Function function) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0, next = 0; PyDict_Next(dict.ptr(), &next, &key, &value); at = next)
      function(Entry{at, pybind11::reinterpret_borrow<pybind11::object>(key),
                     pybind11::reinterpret_borrow<pybind11::object>(value)});
  }

  pybind11::dict states_;
  std::vector<Entry> of_param_;
  std::vector<State> states_of_;
  bool complete_ = false;
};
}  // namespace apex
