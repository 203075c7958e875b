package wire

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// The page on the protocol states what the code does: the environment, the
// limits and every field.
func TestProtocolPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/plugin-protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	want := []string{
		"| `" + CookieKey + "` | `" + CookieValue + "`, the cookie",
		"| `" + LogLevelKey + "` |",
		fmt.Sprintf("separated by commas: `%d` |", ProtocolVersion),
		fmt.Sprintf("\n1|%d|unix|", ProtocolVersion),
		fmt.Sprintf("| first line | %d KiB |", maxHandshake>>10),
		fmt.Sprintf("| a message | %d MiB |", MaxMessage>>20),
		fmt.Sprintf("| a resource | %d MiB |", MaxResource>>20),
		fmt.Sprintf("| silence on a stream | %v; after %v it counts as hung |", strings.ReplaceAll(HeartbeatLimit.String(), "s", " s"), strings.ReplaceAll(HungAfter.String(), "s", " s")),
		fmt.Sprintf("Messages of 1,000 resources or %d MiB", BatchBytes>>20),
		fmt.Sprintf("first %d, are ignored", MaxMetrics),
		"valid for\n  the DNS name `" + serverName + "`",
	}
	if BatchResources != 1000 {
		t.Errorf("BatchResources is %d, which the page does not state", BatchResources)
	}
	for _, v := range Environ("dir", []byte("pem")) {
		name, value, _ := strings.Cut(v, "=")
		want = append(want, "`"+name+"`")
		if strings.HasSuffix(name, "_PORT") {
			want = append(want, "`"+value+"`")
		}
	}
	messages := pluginv1.File_isthmus_plugin_v1_adapter_proto.Messages()
	for i := range messages.Len() {
		fields := messages.Get(i).Fields()
		for j := range fields.Len() {
			want = append(want, "`"+string(fields.Get(j).Name())+"`")
		}
	}
	for _, w := range want {
		if !strings.Contains(page, w) {
			t.Errorf("the page lacks %q", w)
		}
	}
	// The protos are those of the module that the bridge is built with.
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^\s*istio\.io/api (v\S+)$`).FindSubmatch(mod)
	for _, file := range []string{"../../docs/plugin-protocol.md", "../../examples/adapter-python/README.md"} {
		text, err := os.ReadFile(file)
		if err != nil || version == nil || !strings.Contains(string(text), string(version[1])) {
			t.Errorf("%s does not name Istio's protos of go.mod, %s: %v", file, version, err)
		}
	}
}
