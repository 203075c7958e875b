package io.isthmus.tools;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.dubbo.config.ApplicationConfig;
import org.apache.dubbo.config.MetadataReportConfig;
import org.apache.dubbo.config.ProtocolConfig;
import org.apache.dubbo.config.ReferenceConfig;
import org.apache.dubbo.config.RegistryConfig;
import org.apache.dubbo.config.ServiceConfig;
import org.apache.dubbo.config.bootstrap.DubboBootstrap;

/**
 * A Dubbo application: with the property protocols ("dubbo:20880,tri:50051") a provider of Greeter, without it a consumer that prints each answer.
 */
public class Launcher {

    public static void main(String[] args) throws Exception {
        String name = System.getProperty("app");
        ApplicationConfig app = new ApplicationConfig(name);
        app.setQosEnable(false);
        app.setMetadataType(System.getProperty("metadata", "local"));
        RegistryConfig registry = new RegistryConfig(System.getProperty("registry"));
        registry.setParameters(Map.of("register-mode", System.getProperty("mode", "all")));
        registry.setTimeout(20000);
        DubboBootstrap dubbo = DubboBootstrap.getInstance().application(app).registry(registry);
        if (System.getProperty("report") != null) {
            dubbo.metadataReport(new MetadataReportConfig(System.getProperty("report")));
        }
        String version = System.getProperty("version");
        String group = System.getProperty("group");
        String protocols = System.getProperty("protocols");
        if (protocols != null) {
            List<ProtocolConfig> all = new ArrayList<>();
            for (String p : protocols.split(",")) {
                String[] parts = p.split(":");
                ProtocolConfig protocol = new ProtocolConfig(parts[0], Integer.parseInt(parts[1]));
                protocol.setHost("127.0.0.1");
                all.add(protocol);
            }
            ServiceConfig<Greeter> service = new ServiceConfig<>();
            service.setInterface(Greeter.class);
            service.setRef(who -> "hello " + who + " from " + name);
            service.setVersion(version);
            service.setGroup(group);
            dubbo.protocols(all).service(service).start();
            System.out.println("launcher: ready");
            Thread.currentThread().join();
        }
        ReferenceConfig<Greeter> reference = new ReferenceConfig<>();
        reference.setInterface(Greeter.class);
        reference.setVersion(version);
        reference.setGroup(group);
        reference.setCheck(false);
        dubbo.reference(reference).start();
        Greeter greeter = reference.get();
        while (true) {
            try {
                System.out.println("launcher: " + greeter.greet("x"));
            } catch (RuntimeException e) {
                System.out.println("launcher: failed: " + e.getMessage());
            }
            Thread.sleep(200);
        }
    }
}
