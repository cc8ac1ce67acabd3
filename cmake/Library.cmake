# The library _linattn.lib.so (.dylib on macOS). A new subject, csrc/<subject>/{entry,kernels}.cpp, needs no edit here.
file(GLOB KERNEL_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/*/kernels.cpp)
file(GLOB ENTRY_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/core/*.cpp
     ${CMAKE_CURRENT_SOURCE_DIR}/csrc/*/entry.cpp)

add_library(linattn_options INTERFACE)
target_include_directories(linattn_options INTERFACE csrc)
target_compile_options(linattn_options INTERFACE -ffp-contract=fast -fno-math-errno -fno-trapping-math)
if(INSTRUCTION_SETS STREQUAL "portable")
  target_compile_definitions(linattn_options INTERFACE LINATTN_ONLY_PORTABLE)
endif()
if(NOT APPLE)
  target_link_options(linattn_options INTERFACE -pthread)
endif()

add_library(linattn_entries OBJECT ${ENTRY_SOURCES})
target_link_libraries(linattn_entries PRIVATE linattn_options)
set(OBJECTS $<TARGET_OBJECTS:linattn_entries>)
foreach(source IN LISTS KERNEL_SOURCES)
  get_filename_component(folder ${source} DIRECTORY)
  get_filename_component(subject ${folder} NAME)
  foreach(isa IN LISTS INSTRUCTION_SETS)
    add_library(${subject}_${isa} OBJECT ${source})
    target_link_libraries(${subject}_${isa} PRIVATE linattn_options)
    target_compile_definitions(${subject}_${isa} PRIVATE LINATTN_ISA=${isa})
    target_compile_options(${subject}_${isa} PRIVATE ${FLAGS_${isa}})
    list(APPEND OBJECTS $<TARGET_OBJECTS:${subject}_${isa}>)
  endforeach()
endforeach()

# For programs that contain the library, such as the test driver.
add_library(linattn_objects INTERFACE)
target_sources(linattn_objects INTERFACE ${OBJECTS})
target_link_libraries(linattn_objects INTERFACE linattn_options)

if(APPLE)
  set(LIBRARY_ENDING .lib.dylib) # no ending of a Python extension module
else()
  set(LIBRARY_ENDING .lib.so)
endif()
add_library(linattn SHARED ${OBJECTS})
target_link_libraries(linattn PRIVATE linattn_options)
set_target_properties(
  linattn
  PROPERTIES LINKER_LANGUAGE CXX
             PREFIX ""
             OUTPUT_NAME _linattn
             SUFFIX ${LIBRARY_ENDING}
             NO_SONAME ON
             MACOSX_RPATH ON)

if(LINATTN_IN_PLACE)
  set_target_properties(linattn PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${SOURCE_PACKAGE_DIR})
  file(REMOVE ${SOURCE_PACKAGE_DIR}/${REASON_FILE})
  file(CREATE_LINK ${CMAKE_BINARY_DIR}/compile_commands.json ${CMAKE_CURRENT_SOURCE_DIR}/compile_commands.json SYMBOLIC
       RESULT ignored)
else()
  install(TARGETS linattn LIBRARY DESTINATION ${PACKAGE_DIR})
endif()
