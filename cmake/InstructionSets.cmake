# INSTRUCTION_SETS: those that a CPU of the compiler's target may have, which need not be this machine's; FLAGS_<set>: what
# each is compiled with. engines/native/ffi.py has the same names in this order.
set(FLAGS_portable "")
set(FLAGS_avx2 -mavx2 -mfma -mf16c)
set(FLAGS_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl ${FLAGS_avx2} -mprefer-vector-width=512)
set(FLAGS_neon -DLINATTN_NEON)

if(APPLE AND CMAKE_OSX_ARCHITECTURES)
  set(target "${CMAKE_OSX_ARCHITECTURES}")
elseif(CMAKE_CXX_COMPILER_TARGET)
  set(target "${CMAKE_CXX_COMPILER_TARGET}")
else()
  separate_arguments(arguments NATIVE_COMMAND "${CMAKE_CXX_COMPILER_ARG1}")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} ${arguments} -dumpmachine
                  OUTPUT_VARIABLE target OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
string(TOLOWER "${target}" target)

if(LINATTN_PORTABLE_ONLY)
  set(INSTRUCTION_SETS portable)
elseif(target MATCHES "^(x86_64|amd64)(-|$)")
  set(INSTRUCTION_SETS portable avx2 avx512)
elseif(target MATCHES "^(aarch64|arm64)(-|$)")
  set(INSTRUCTION_SETS portable neon)
else()
  set(INSTRUCTION_SETS portable)
endif()
if(NOT INSTRUCTION_SETS STREQUAL "portable")
  set(FLAGS_portable $<$<CONFIG:Release>:-O2>) # for CPUs that have none of the others: a fifth smaller than with -O3
endif()
message(STATUS "linattn: instruction sets for ${target}: ${INSTRUCTION_SETS}")
