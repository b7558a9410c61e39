import sysconfig

from setuptools import setup

# The compiled part uses the limited API, so one wheel serves every Python from 3.10 on; free-threaded ones have none.
options = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(cffi_modules=["native/build_ffi.py:ffibuilder"], options=options)
