package reliability

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// threads are public reports of other programs that follow registries, and what
// replays them here.
var threads = []struct {
	issues []string
	what   string
	faults []string
	tests  []string // folder and function
}{
	{
		[]string{"slime-io/slime#389"},
		"one request that fails deletes all services and instances of a server",
		[]string{"Consul answers with errors", "Consul's answers break off", "Nacos unreachable"},
		[]string{"adapters/consul TestErrorsRemoveNothing", "adapters/consul TestOneServiceFails"},
	},
	{
		[]string{"hashicorp/consul-k8s#280", "hashicorp/consul-k8s#319", "hashicorp/consul-k8s#4714"},
		"a restart removes what is alive, as removal begins before the set is complete",
		[]string{"SIGKILL of the bridge", "SIGKILL of the plugin of Consul", "the bridge starts while Consul is unreachable"},
		[]string{"test/e2e TestRestartAgainstEmptyConsul", "test/e2e TestRestartingConsulIsNotWhole"},
	},
	{
		[]string{"hashicorp/consul-k8s#579"},
		"two replicas remove what the other has",
		nil,
		[]string{"test/e2e TestReplicas"},
	},
	{
		[]string{"kgateway-dev/kgateway#9873"},
		"an edit of the configuration resets the endpoints from Consul for seconds",
		[]string{"the configuration is edited, and edited back"},
		nil,
	},
	{
		[]string{"alibaba/nacos#4470", "alibaba/nacos#10209"},
		"a Nacos that was restarted pushes empty lists until its clients have registered again",
		[]string{"SIGKILL of Nacos"},
		[]string{"test/nacos TestEmptiedNacosIsHeldBack"},
	},
	{
		[]string{"higress-group/higress#1546", "higress-group/higress#1566"},
		"the last instance that goes stays in the mesh",
		nil,
		[]string{"test/e2e TestConsulChangeReachesProxy", "test/nacos TestEmptiedNacosIsHeldBack"},
	},
}

func threadRows() string {
	var b strings.Builder
	b.WriteString("| thread | what happened | here |\n|---|---|---|\n")
	for _, th := range threads {
		var links, here []string
		for _, issue := range th.issues {
			links = append(links, fmt.Sprintf("[%s](https://github.com/%s)", issue, strings.Replace(issue, "#", "/issues/", 1)))
		}
		here = append(here, th.faults...)
		for _, test := range th.tests {
			folder, name, _ := strings.Cut(test, " ")
			here = append(here, fmt.Sprintf("`%s` in %s", name, folder))
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", strings.Join(links, ", "), th.what, strings.Join(here, "; "))
	}
	return "What happened to others, and the fault above or the test that replays it.\n\n" + b.String()
}

// What docs/reliability.md says replays a public thread is there.
func TestThreads(t *testing.T) {
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		for _, name := range th.faults {
			if !slices.ContainsFunc(faults, func(f fault) bool { return f.name == name }) {
				t.Errorf("%v: there is no fault %q", th.issues, name)
			}
		}
		for _, test := range th.tests {
			folder, name, _ := strings.Cut(test, " ")
			files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(files, func(file string) bool {
				text, err := os.ReadFile(file)
				return err == nil && regexp.MustCompile(`(?m)^func `+name+`\(`).Match(text)
			}) {
				t.Errorf("%v: there is no %s", th.issues, test)
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "docs", "reliability.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "\n## Public threads\n\n"+strings.TrimSpace(threadRows())+"\n") {
		t.Error("docs/reliability.md has other public threads; make chaos writes it")
	}
}

// The page states the runs that are kept.
func TestPageHasRuns(t *testing.T) {
	text, err := os.ReadFile("../../docs/reliability.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), chaosHead+strings.TrimSpace(chaosText(readRecords(t)))+"\n") {
		t.Errorf("docs/reliability.md has other runs than %s; make chaos ROUNDS=0 writes it", recordsFile)
	}
}
