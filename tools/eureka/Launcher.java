package io.isthmus.tools;

import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.cloud.netflix.eureka.server.EnableEurekaServer;
import org.springframework.context.annotation.Bean;
import org.springframework.core.env.Environment;
import org.springframework.security.config.Customizer;
import org.springframework.security.config.annotation.web.builders.HttpSecurity;
import org.springframework.security.web.SecurityFilterChain;

/** Starts a Eureka server, open to everyone unless spring.security.user.name is set. */
@SpringBootApplication
@EnableEurekaServer
public class Launcher {

    @Bean
    SecurityFilterChain access(HttpSecurity http, Environment env) throws Exception {
        http.csrf(csrf -> csrf.disable());
        if (env.containsProperty("spring.security.user.name")) {
            http.authorizeHttpRequests(all -> all.anyRequest().authenticated()).httpBasic(Customizer.withDefaults());
        } else {
            http.authorizeHttpRequests(all -> all.anyRequest().permitAll());
        }
        return http.build();
    }

    public static void main(String[] args) {
        SpringApplication.run(Launcher.class, args);
    }
}
