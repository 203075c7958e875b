package config

import (
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func TestMemory(t *testing.T) {
	const meminfo = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\n"
	for name, tt := range map[string]struct {
		files map[string]string
		env   string
		want  int
		from  string
	}{
		"nothing tells": {},
		"machine":       {files: map[string]string{"proc/meminfo": meminfo}, want: 16_384_000_000, from: "/proc/meminfo"},
		"v2": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
			"sys/fs/cgroup/kubepods/memory.max": "max\n", "sys/fs/cgroup/kubepods/pod1/memory.max": "2147483648\n", "sys/fs/cgroup/kubepods/pod1/c1/memory.max": "1073741824\n",
		}, want: 1 << 30, from: "/sys/fs/cgroup/kubepods/pod1/c1/memory.max"},
		"v2 parent is lower": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/memory.max": "1073741824\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
		}, want: 1 << 30, from: "/sys/fs/cgroup/a/memory.max"},
		"v2 in a namespace": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1073741824\n",
		}, want: 1 << 30, from: "/sys/fs/cgroup/memory.max"},
		"v1": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "9:cpu:/other\n4:hugetlb,memory:/a/b\n0::/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "1073741824\n",
		}, want: 1 << 30, from: "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"},
		"v1 with the path of the host": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/docker/0123\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
		}, want: 1 << 30, from: "/sys/fs/cgroup/memory/memory.limit_in_bytes"},
		"v1 without a limit": {files: map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
		}, want: 16_384_000_000, from: "/proc/meminfo"},
		"GOMEMLIMIT":             {files: map[string]string{"proc/meminfo": meminfo}, env: "900MiB", want: 900 << 20, from: "GOMEMLIMIT"},
		"GOMEMLIMIT is higher":   {files: map[string]string{"proc/meminfo": meminfo}, env: "100GiB", want: 16_384_000_000, from: "/proc/meminfo"},
		"GOMEMLIMIT too large":   {files: map[string]string{"proc/meminfo": meminfo}, env: "99999999TiB", want: 16_384_000_000, from: "/proc/meminfo"},
		"GOMEMLIMIT is off":      {files: map[string]string{"proc/meminfo": meminfo}, env: "off", want: 16_384_000_000, from: "/proc/meminfo"},
		"files that are damaged": {files: map[string]string{"proc/meminfo": "MemTotal: x kB", "proc/self/cgroup": "x\n0::/../..\n:::\n", "sys/fs/cgroup/memory.max": "-1\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := make(fstest.MapFS)
			for file, text := range tt.files {
				root[file] = &fstest.MapFile{Data: []byte(text)}
			}
			n, from := Memory(root, func(string) (string, bool) { return tt.env, tt.env != "" })
			if n != tt.want || from != tt.from {
				t.Errorf("%d of %q, want %d of %q", n, from, tt.want, tt.from)
			}
		})
	}
}

func TestFit(t *testing.T) {
	const one = "registries: [{name: a, type: sim}]\n"
	const three = "registries: [{name: a, type: sim}, {name: b, type: sim}, {name: c, type: sim}]\n"
	fixed := Limits{ConnectionsPerPeer: 1000, PluginFiles: 4096, Tombstones: 100_000}
	for name, tt := range map[string]struct {
		text   string
		memory int
		want   Limits
	}{
		"not known":    {one, 0, Default.Limits},
		"much":         {one, 64 << 30, Default.Limits},
		"much for all": {three, 64 << 30, Default.Limits},
		"1 GiB": {one, 1 << 30, Limits{
			ResourcesPerRegistry: 104_857, ServicesPerRegistry: 43_690, BytesPerRegistry: 44_739_242, Streams: 3276,
			RequestBytes: 64 << 20, RetainedBytes: 64 << 20, ResponseBytes: 64 << 20, PluginMemory: 512 << 20,
		}},
		"1 GiB, three": {three, 1 << 30, Limits{
			ResourcesPerRegistry: 34_952, ServicesPerRegistry: 14_563, BytesPerRegistry: 14_913_080, Streams: 3276,
			RequestBytes: 64 << 20, RetainedBytes: 64 << 20, ResponseBytes: 64 << 20, PluginMemory: 178_956_970,
		}},
		"little": {one, 1 << 20, Limits{
			ResourcesPerRegistry: 1000, ServicesPerRegistry: 1000, BytesPerRegistry: 1 << 20, Streams: 100,
			RequestBytes: maxRequest, RetainedBytes: minBudget, ResponseBytes: minBudget, PluginMemory: minPluginMemory,
		}},
		"what the file says": {one + "limits: {bytes_per_registry: 2000000000, plugin_memory: 0, streams: 5}\n", 1 << 30, Limits{
			ResourcesPerRegistry: 104_857, ServicesPerRegistry: 43_690, BytesPerRegistry: 2_000_000_000, Streams: 5,
			RequestBytes: 64 << 20, RetainedBytes: 64 << 20, ResponseBytes: 64 << 20,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := parse(t, tt.text, Options{Adapters: []string{"sim"}})
			if tt.want.Tombstones == 0 {
				tt.want.ConnectionsPerPeer, tt.want.PluginFiles, tt.want.Tombstones = fixed.ConnectionsPerPeer, fixed.PluginFiles, fixed.Tombstones
			}
			if diff := cmp.Diff(tt.want, c.Fit(tt.memory)); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// TestFitTogether adds up what limits cost, as performance.md measured it.
func TestFitTogether(t *testing.T) {
	for _, registries := range []string{"{name: a, type: sim}", "{name: a, type: sim}, {name: b, type: sim}"} {
		c := parse(t, "registries: ["+registries+"]\n", Options{Adapters: []string{"sim"}})
		for memory := 1 << 30; memory <= 64<<30; memory *= 2 {
			l, n := c.Fit(memory), len(c.Registries)
			bridge := n*(l.BytesPerRegistry/10*16+l.ServicesPerRegistry*1300+l.ResourcesPerRegistry*400) +
				l.Streams*20480 + l.RequestBytes + l.RetainedBytes + l.ResponseBytes
			if bridge > BridgeShare(memory) || BridgeShare(memory)+n*l.PluginMemory > memory {
				t.Errorf("%d registries in %d: the bridge takes %d, each plugin %d", n, memory, bridge, l.PluginMemory)
			}
		}
	}
}
