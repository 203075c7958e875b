package io.isthmus.tools;

import com.alibaba.nacos.core.code.ControllerMethodsCache;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.boot.web.servlet.ServletComponentScan;
import org.springframework.scheduling.annotation.EnableScheduling;

/** Starts a Nacos 2.1 server without its console. */
@SpringBootApplication(scanBasePackages = "com.alibaba.nacos")
@ServletComponentScan("com.alibaba.nacos")
@EnableScheduling
public class Launcher {

    /** The console's module does this otherwise; without it every call of the v1 HTTP API answers 501. */
    public Launcher(ControllerMethodsCache methods) {
        methods.initClassMethod("com.alibaba.nacos.core.controller");
        methods.initClassMethod("com.alibaba.nacos.naming.controllers");
        methods.initClassMethod("com.alibaba.nacos.config.server.controller");
    }

    public static void main(String[] args) {
        SpringApplication.run(Launcher.class, args);
    }
}
