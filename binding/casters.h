// casters.h: which of Python's values the binding takes for a flag and for a number.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <type_traits>

namespace minimal_attn {
// Python's True or False alone: pybind11's own bool takes None and numbers, too.
struct Flag {
    bool value;
    operator bool() const { return value; }
};

// Python's int or float, or NumPy's. pybind11's own caster takes True and False, too, and a float tensor as an int.
template <class T>
struct Number {
    T value;
    operator T() const { return value; }
};

}  // namespace minimal_attn

template <>
struct pybind11::detail::type_caster<minimal_attn::Flag> {
    PYBIND11_TYPE_CASTER(minimal_attn::Flag, const_name("bool"));
    bool load(handle x, bool) {
        value.value = x.ptr() == Py_True;
        return PyBool_Check(x.ptr());
    }
};

template <class T>
struct pybind11::detail::type_caster<minimal_attn::Number<T>> {
    PYBIND11_TYPE_CASTER(minimal_attn::Number<T>, const_name("number"));
    bool load(handle x, bool) {
        make_caster<T> caster;
        if (PyBool_Check(x.ptr()) || !caster.load(x, /*convert=*/std::is_floating_point_v<T>)) return false;
        value.value = cast_op<T>(caster);
        return true;
    }
};
