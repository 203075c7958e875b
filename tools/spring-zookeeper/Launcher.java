package io.isthmus.tools;

import java.util.List;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.cloud.client.ServiceInstance;
import org.springframework.cloud.client.discovery.DiscoveryClient;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PathVariable;
import org.springframework.web.bind.annotation.RestController;

/** An application of Spring Cloud that registers itself, as its properties say, and tells what its own client sees. */
@SpringBootApplication
@RestController
public class Launcher {

    private final DiscoveryClient registry;

    Launcher(DiscoveryClient registry) {
        this.registry = registry;
    }

    @GetMapping("/instances/{service}")
    List<String> instances(@PathVariable("service") String service) {
        return registry.getInstances(service).stream().map(ServiceInstance::getInstanceId).sorted().toList();
    }

    public static void main(String[] args) {
        SpringApplication.run(Launcher.class, args);
    }
}
