package io.isthmus.tools;

public interface Greeter {
    String greet(String name);
}
