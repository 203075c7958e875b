// Package testapp runs applications that register themselves with a registry:
// those of Dubbo and of Spring Cloud.
//
// They are built with Maven from the poms in tools/dubbo-3, tools/dubbo-2.7,
// tools/spring and tools/spring-zookeeper (half a minute each). Each starts in
// five to ten seconds.
package testapp

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Dubbo3Tool and Dubbo2Tool are an application of Dubbo, with the newest and
// the oldest version that is tested.
var (
	Dubbo3Tool = testenv.MavenTool("dubbo-3", "dubbo-3", "dubbo-3", "")
	Dubbo2Tool = testenv.MavenTool("dubbo-2.7", "dubbo-2.7", "dubbo-3", "")
)

// DubboTool returns the version to test against: the newest, or the oldest if
// [Compat].
func DubboTool() (tool testenv.Tool, applications bool) {
	if testenv.Compat() {
		return Dubbo2Tool, false
	}
	return Dubbo3Tool, true
}

// DubboInterface is what applications of Dubbo offer in tests.
const DubboInterface = "io.isthmus.tools.Greeter"

// DubboRule is a rule of Dubbo's configuration center for the providers of an
// application: none of them is to be called, and their weight is 300. Dubbo 2.7
// wants to have the port.
func DubboRule(app string, port int) string {
	return fmt.Sprintf(`configVersion: v2.7
scope: application
key: %s
enabled: true
configs:
- addresses: ["0.0.0.0:%d"]
  side: provider
  parameters: {weight: "300", disabled: "true"}
`, app, port)
}

// StartDubbo starts an application that registers at a registry, as Dubbo
// writes its URL, and waits until it serves, or has called. The properties are
// those of tools/dubbo-3/Launcher.java; with protocols it is a provider of
// DubboInterface, without a consumer that calls it again and again.
func StartDubbo(t testing.TB, tool testenv.Tool, registry, app string, properties map[string]string) *testenv.Process {
	t.Helper()
	d := testenv.NewProcess(t, app)
	binary := tool.Binary(t)
	all := map[string]string{"app": app, "registry": registry}
	maps.Copy(all, properties)
	args := append([]string{"--add-opens=java.base/java.lang=ALL-UNNAMED", "-Djava.net.preferIPv4Stack=true", "-Duser.home=" + d.Dir}, testenv.JavaArgs(d.Dir, 256, all)...)
	said := "launcher: ready"
	if properties["protocols"] == "" {
		said = "launcher: "
	}
	d.StartReady(t, func() {
		d.Start(t, nil, binary, args...)
	}, func() (string, bool) { return "its output", strings.Contains(d.Output(), said) })
	return d
}
