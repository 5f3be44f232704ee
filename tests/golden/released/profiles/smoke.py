with step("a step"):
    print("hello")
