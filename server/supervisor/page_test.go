package supervisor_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// The page on the protocol states the bridge's time limits, the bounds of a
// plugin's log and what may be sent.
func TestProtocolPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/plugin-protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	page := strings.Join(strings.Fields(string(text)), " ")
	start, answer, end, minBackoff, maxBackoff, refused, healthy := supervisor.Limits()
	want := []string{
		fmt.Sprintf("| time to the handshake | %d s |", start/time.Second),
		fmt.Sprintf("| an answer to Describe or Configure | %d s |", answer/time.Second),
		fmt.Sprintf("| the end after SIGTERM | %d s |", end/time.Second),
		fmt.Sprintf("starts it again after %v s, doubled each time up to %d s", minBackoff.Seconds(), maxBackoff/time.Second),
		fmt.Sprintf("Of a line %d KiB are logged, of a plugin %d lines and %d KiB a second", supervisor.MaxLine>>10, supervisor.MaxLines, supervisor.MaxBytes>>10),
	}
	if refused != time.Minute || healthy != time.Minute {
		t.Errorf("refused %v, healthy %v; the page says a minute", refused, healthy)
	}
	for _, name := range slices.Sorted(slices.Values(collection.All())) {
		of := strings.Index(page, "| `"+name+"` | `")
		if of < 0 {
			t.Errorf("the page lacks %s", name)
			continue
		}
		message, _, _ := strings.Cut(page[of+len("| `"+name+"` | `"):], "`")
		if collection.OfBody(message) != name {
			t.Errorf("the page says that %s holds %s", name, message)
		}
	}
	for _, w := range want {
		if !strings.Contains(page, w) {
			t.Errorf("the page lacks %q", w)
		}
	}
}
