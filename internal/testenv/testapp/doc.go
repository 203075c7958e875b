// Package testapp runs applications that register themselves with a registry:
// those of Dubbo and of Spring Cloud.
//
// They are built with Maven from the poms in tools/dubbo-3, tools/dubbo-2.7,
// tools/spring and tools/spring-zookeeper (half a minute each). Each starts in
// five to ten seconds.
package testapp
