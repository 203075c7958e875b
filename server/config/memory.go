package config

import (
	"bufio"
	"bytes"
	"io/fs"
	"log/slog"
	"math"
	"path"
	"reflect"
	"regexp"
	"strconv"
	"strings"
)

// Memory returns the memory that there is for the bridge and its plugins
// together, in bytes, and where that is written; 0 if nothing tells. It is the
// least of what the memory cgroups allow along the path of the process, v1 and
// v2, of GOMEMLIMIT, and of what the machine has. root is the file system.
func Memory(root fs.FS, lookupEnv func(string) (string, bool)) (most int, from string) {
	most = math.MaxInt
	least := func(n uint64, file string) {
		if n > 0 && n < uint64(most) {
			most, from = int(n), file
		}
	}
	if data, err := fs.ReadFile(root, "proc/meminfo"); err == nil {
		if m := memTotal.FindSubmatch(data); m != nil {
			n, _ := strconv.ParseUint(string(m[1]), 10, 43) // of kB
			least(n<<10, "/proc/meminfo")
		}
	}
	data, _ := fs.ReadFile(root, "proc/self/cgroup")
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		fields := strings.SplitN(lines.Text(), ":", 3) // number:controllers:path
		if len(fields) != 3 {
			continue
		}
		mount, file := "sys/fs/cgroup", "memory.max"
		switch {
		case fields[0] == "0" && fields[1] == "":
		case strings.Contains(","+fields[1]+",", ",memory,"):
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container without a cgroup namespace the path is the host's, and
		// the mount begins at the container's cgroup: only the root exists.
		for dir := path.Clean("/" + fields[2]); ; dir = path.Dir(dir) {
			name := path.Join(mount, dir, file)
			if text, err := fs.ReadFile(root, name); err == nil {
				n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // or max
				least(n, "/"+name)
			}
			if dir == "/" {
				break
			}
		}
	}
	if text, ok := lookupEnv("GOMEMLIMIT"); ok {
		if m := goLimit.FindStringSubmatch(text); m != nil {
			n, _ := strconv.ParseUint(m[1], 10, 64)
			unit := strings.Index("BKMGT", m[2][:1]) * 10
			if n <= math.MaxInt>>unit {
				least(n<<unit, "GOMEMLIMIT")
			}
		}
	}
	if from == "" {
		return 0, ""
	}
	return most, from
}

// LogValue implements [slog.LogValuer]: the limits by their names in the file.
func (l Limits) LogValue() slog.Value {
	v := reflect.ValueOf(l)
	attrs := make([]slog.Attr, v.NumField())
	for i := range attrs {
		attrs[i] = slog.Int64(v.Type().Field(i).Tag.Get("json"), v.Field(i).Int())
	}
	return slog.GroupValue(attrs...)
}

var (
	memTotal = regexp.MustCompile(`(?m)^MemTotal:\s+(\d+) kB$`)
	goLimit  = regexp.MustCompile(`^(\d+)(B|KiB|MiB|GiB|TiB)$`)
)

// BridgeShare returns the part of the memory that the bridge may take. Half is
// for plugins, and a sixteenth is left.
func BridgeShare(memory int) int { return memory / 16 * 7 }

// Fit returns the limits for a process that has so much memory. What the file
// sets stays. Each other limit that costs memory is at most its default, and so
// low that all of them together fit:
//
//   - 1/2 for plugins, an equal part each;
//   - 3/16 for requests, responses, and what streams ask for, and 1/16 for streams
//     of 20 kB;
//   - 3/16 for the state: a counted byte takes 1.6 bytes of heap, a service 1.3 kB
//     and a resource 0.4 kB besides.
//
// Below 1 GiB, or with many registries, least values exceed this.
func (c *Config) Fit(memory int) Limits {
	l := c.Limits
	if memory == 0 {
		return l
	}
	each := memory / max(1, len(c.Registries))
	for _, f := range []struct {
		name        string
		value       *int
		fits, least int
	}{
		{"resources_per_registry", &l.ResourcesPerRegistry, each / 10240, 1000},
		{"services_per_registry", &l.ServicesPerRegistry, each / 24576, 1000},
		{"bytes_per_registry", &l.BytesPerRegistry, each / 24, 1 << 20},
		{"streams", &l.Streams, memory / 16 / 20480, 100},
		{"request_bytes", &l.RequestBytes, memory / 16, maxRequest},
		{"retained_bytes", &l.RetainedBytes, memory / 16, minBudget},
		{"response_bytes", &l.ResponseBytes, memory / 16, minBudget},
		{"plugin_memory", &l.PluginMemory, each / 2, minPluginMemory},
	} {
		if c.doc == nil || !c.doc.Has("limits."+f.name) {
			*f.value = min(*f.value, max(f.fits, f.least))
		}
	}
	return l
}
