# CMake reads this where it begins with llama-cpp-python, whose CMakeLists.txt asks for all that llama.cpp's programs
# share. That is half of what would be compiled, only pictures and sound (LLAVA_BUILD) need it, and it is not installed.
# A variable goes before what that file puts into CMake's cache.
if(NOT LLAVA_BUILD)
    set(LLAMA_BUILD_COMMON OFF)
endif()
