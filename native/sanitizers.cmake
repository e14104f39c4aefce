# What ROOFTILE_SANITIZE asks for, for everything that is compiled here.
if(ROOFTILE_SANITIZE STREQUAL "address")
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all)
  add_compile_definitions(ROOFTILE_REDZONES)
elseif(ROOFTILE_SANITIZE STREQUAL "thread")
  # libgomp is not instrumented, and its synchronisation would look like races: the same tasks run on std::thread.
  set(sanitize -fsanitize=thread)
  add_compile_definitions(ROOFTILE_STD_THREADS)
else()
  message(FATAL_ERROR "ROOFTILE_SANITIZE is ${ROOFTILE_SANITIZE}; it can be OFF, address or thread")
endif()

include(CheckCXXSourceCompiles)
string(REPLACE ";" " " CMAKE_REQUIRED_FLAGS "${sanitize}")
check_cxx_source_compiles("int main() { return 0; }" ROOFTILE_HAS_SANITIZERS)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT ROOFTILE_HAS_SANITIZERS)
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} can't link ${sanitize}: install the sanitizers' libraries that belong to it")
endif()

set(optimise -O1 -g -fno-omit-frame-pointer ${sanitize})
add_link_options(${sanitize})
