// What is used of CPython's stable ABI (PEP 384, from 3.10 on), declared here: the module is compiled with libapex, by
// any compiler, for any platform, without the headers of a Python. A free-threaded Python has another layout of objects
// and is not served.
#pragma once
#include <cstdint>

using Py_ssize_t = intptr_t;
struct PyObject {
  Py_ssize_t references;
  void* type;
};
using PyCFunction = PyObject* (*)(PyObject*, PyObject*);

struct PyMethodDef {
  const char* name;
  PyCFunction function;
  int flags;
  const char* documentation;
};
constexpr int METH_FASTCALL = 0x80;  // called with an array of arguments and their number

struct PyModuleDef {
  struct Base {
    PyObject object;
    PyObject* (*init)();
    Py_ssize_t index;
    PyObject* copy;
  } base;
  const char* name;
  const char* documentation;
  Py_ssize_t size;
  PyMethodDef* methods;
  void *slots, *traverse, *clear, *free;
};
constexpr int python_abi = 3;  // of PyModule_Create2

extern "C" {
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyExc_TypeError, *PyExc_RuntimeError;
PyObject* PyModule_Create2(PyModuleDef* definition, int abi);
int PyModule_AddStringConstant(PyObject* module, const char* name, const char* value);
void Py_IncRef(PyObject* object);
void Py_DecRef(PyObject* object);
PyObject* PyObject_Type(PyObject* object);                        // a new reference
PyObject* PyObject_CallFunctionObjArgs(PyObject* function, ...);  // up to a null; a new reference
PyObject* PyBool_FromLong(long value);
PyObject* PyLong_FromLong(long value);
long PyLong_AsLong(PyObject* object);
long long PyLong_AsLongLong(PyObject* object);
void* PyLong_AsVoidPtr(PyObject* object);
double PyFloat_AsDouble(PyObject* object);
Py_ssize_t PyList_Size(PyObject* list);
PyObject* PyList_GetItem(PyObject* list, Py_ssize_t index);                               // borrowed
int PyDict_Next(PyObject* dict, Py_ssize_t* position, PyObject** key, PyObject** value);  // borrowed; 0: at the end
Py_ssize_t PySequence_Size(PyObject* sequence);
PyObject* PySequence_GetItem(PyObject* sequence, Py_ssize_t index);  // a new reference
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
void PyErr_SetString(PyObject* type, const char* message);
PyObject* PyErr_Occurred();
void PyErr_Clear();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}
inline PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}
