package plugin

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Access is what an adapter needs of its machine. The files of its
// configuration, which are the fields whose JSON names end in _file and
// ca_path, need not be listed, nor what the system has for every program: name
// resolution, time zones, authorities of certificates.
//
// A file is reached through the directory around it, so that it may be replaced
// by renaming another one, as orchestrators and certificate managers do.
type Access struct {
	// Read are further files and directories that are read.
	Read []string
	// Write are files that are written, by way of another one beside them.
	Write []string
	// Ports are the TCP ports of the servers. DNS over TCP needs no mention.
	Ports []uint16
	// AnyPort means that the ports are known only later.
	AnyPort bool
	// UnixSockets means that a server may be reached by a Unix socket.
	UnixSockets bool
}

// network reports whether the adapter has servers.
func (a Access) network() bool { return a.AnyPort || len(a.Ports) > 0 || a.UnixSockets }

// URLPorts returns the TCP ports of servers that [CheckServers] accepts.
func URLPorts(servers []string) (ports []uint16) {
	for _, s := range servers {
		u, err := url.Parse(s)
		if err != nil {
			continue // refused before
		}
		name := u.Port()
		if name == "" {
			name = map[string]string{"http": "80", "https": "443"}[u.Scheme]
		}
		if n, err := strconv.ParseUint(name, 10, 16); err == nil {
			ports = append(ports, uint16(n))
		}
	}
	return ports
}

// proxyPorts returns the TCP ports of the proxies that the environment names,
// through which gRPC and HTTP clients reach servers.
func proxyPorts(getenv func(string) string) (ports []uint16) {
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} {
		proxy := getenv(name)
		if proxy != "" && !strings.Contains(proxy, "://") {
			proxy = "http://" + proxy
		}
		ports = append(ports, URLPorts([]string{proxy})...)
	}
	return ports
}

// WithAccess makes the plugin give up every other right once it is configured,
// where the kernel lets it: see [Access]. f gets the configuration, which is
// valid. Without this option the plugin keeps the rights of its process.
func WithAccess[C any](f func(C) Access) Option[C] { return accessOption[C](f) }

type accessOption[C any] func(C) Access

func (f accessOption[C]) set(o *options) {
	o.access = func(c any) Access {
		config := c.(C) //nolint:forcetypeassert // Main decodes a C
		a := f(config)
		a.Read = append(slices.Clone(a.Read), configuredFiles(reflect.ValueOf(config))...)
		if len(a.Ports) > 0 {
			a.Ports = append(slices.Clone(a.Ports), proxyPorts(os.Getenv)...)
		}
		return a
	}
}

// configuredFiles returns the values of the fields that name files.
func configuredFiles(v reflect.Value) (files []string) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		return configuredFiles(v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			files = append(files, configuredFiles(v.Index(i))...)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			f := v.Field(i)
			switch {
			case f.Kind() != reflect.String:
				files = append(files, configuredFiles(f)...)
			case f.Len() > 0 && (strings.HasSuffix(name, "_file") || name == "ca_path"):
				files = append(files, f.String())
			}
		}
	}
	return files
}

// confinement is what a plugin may still read and write.
type confinement struct {
	read, write []string // as configured
	roots       []root
}

// root is a directory, or a file of the system, that stays accessible with what
// is below it: the one that was there, not another one of that path.
type root struct {
	path   string
	info   os.FileInfo // nil if it did not exist
	write  bool
	system bool // every plugin has it
	fixed  bool // nothing is lost if another takes its path
}

// systemPaths are what a Go program reads of its system: the resolver's files,
// time zones, authorities of certificates, libraries.
var systemPaths = []string{
	"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols",
	"/etc/localtime", "/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo",
	"/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem", "/etc/pki/tls/certs", "/etc/pki/ca-trust",
	"/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/var/lib/ca-certificates",
	"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null",
}

// resolverPaths are those of systemPaths that are read again and again by a
// plugin that connects to anything. It reads the others once, before it gives
// up its rights, or does well without them.
var resolverPaths = []string{"/etc/resolv.conf", "/etc/hosts"}

// newConfinement finds the directories of the files. The last ones are those of
// the environment.
func newConfinement(a Access) *confinement {
	c := &confinement{read: a.Read, write: a.Write}
	for _, path := range a.Read {
		c.add(path, false)
	}
	for _, path := range a.Write {
		c.add(path, true)
	}
	for _, path := range systemPaths {
		c.addSystem(path, !a.network() || !slices.Contains(resolverPaths, path))
	}
	for _, path := range slices.Concat([]string{os.Getenv("SSL_CERT_FILE")}, filepath.SplitList(os.Getenv("SSL_CERT_DIR"))) {
		if path != "" {
			c.addSystem(path, true)
		}
	}
	if a.network() {
		// Read once by a process, and not again whatever happens to the files.
		_, _ = x509.SystemCertPool() // without any, connections say so
	}
	if dir := os.Getenv(socketDirKey); dir != "" {
		info, _ := os.Stat(dir)
		c.roots = append(c.roots, root{path: dir, info: info, write: true, system: true})
	}
	return c
}

// addSystem makes a path of the system accessible. A link to a file is followed
// to its directory, in which a service of the system renews it; a file stays
// the one it is, as its directory is no plugin's.
func (c *confinement) addSystem(path string, fixed bool) {
	info, err := os.Stat(path)
	if target, terr := filepath.EvalSymlinks(path); terr == nil && target != path && !info.IsDir() {
		if dir := filepath.Dir(target); dir != "/" && dir != filepath.Dir(path) {
			path = dir
			info, err = os.Stat(dir)
		}
	}
	if err == nil {
		c.roots = append(c.roots, root{path: path, info: info, system: true, fixed: fixed})
	}
}

// add makes a path accessible: a directory, or that around a file, as it is
// spelled and as it resolves.
func (c *confinement) add(path string, write bool) {
	for _, dir := range around(path) {
		if !slices.ContainsFunc(c.roots, func(r root) bool { return r.path == dir && r.write == write }) {
			info, _ := os.Stat(dir)
			c.roots = append(c.roots, root{path: dir, info: info, write: write})
		}
	}
}

// around returns the directories through which a path is reached.
func around(path string) (dirs []string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		return []string{path}
	}
	dirs = []string{filepath.Dir(path)}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		if info, err := os.Stat(target); err == nil && !info.IsDir() {
			target = filepath.Dir(target)
		}
		if !beneath(target, dirs[0]) {
			dirs = append(dirs, target)
		}
	}
	return dirs
}

// beneath reports whether a path is the directory or below it.
func beneath(path, dir string) bool {
	if resolved, err := filepath.EvalSymlinks(dir); err == nil {
		dir = resolved
	}
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// errMoved means that a path leads to what the process gave up the right to
// read: only another process can.
var errMoved = errors.New("a file is no longer where the plugin may read")

// lookEvery is how often the paths are looked at. Go's resolver reads its files
// again as often.
const lookEvery = 5 * time.Second

// follow cancels when a path leads elsewhere, until ctx ends.
func (c *confinement) follow(ctx context.Context, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := c.moved(); err != nil {
				cancel(err)
				return
			}
		}
	}
}

// moved returns an errMoved if a path leads elsewhere.
func (c *confinement) moved() error {
	for _, r := range c.roots {
		if r.fixed {
			continue
		}
		info, err := os.Stat(r.path)
		if err == nil && (r.info == nil || !os.SameFile(info, r.info)) {
			return fmt.Errorf("%w: %s was replaced", errMoved, r.path)
		}
	}
	for _, path := range slices.Concat(c.read, c.write) {
		if _, err := os.Lstat(path); err != nil {
			continue
		}
		for _, dir := range around(path) {
			resolved, err := filepath.EvalSymlinks(dir)
			if err == nil && !slices.ContainsFunc(c.roots, func(r root) bool { return r.path == dir || beneath(resolved, r.path) }) {
				return fmt.Errorf("%w: %s is in %s now", errMoved, path, dir)
			}
		}
	}
	return nil
}

// landlockNet is the first version of Landlock that confines TCP ports.
const landlockNet = 4

// unconfinable is the violation of a registry that requires confinement.
func unconfinable(why string) error {
	return &FieldError{Field: "plugin.confinement", Reason: "is required, and " + why}
}

// gaps returns what keeps the process from being confined as the adapter says,
// with the given version of Landlock and the outcome of seccomp.
func (a Access) gaps(landlock int, seccomp error) error {
	switch {
	case seccomp != nil:
		return unconfinable("system calls are not confined: " + seccomp.Error())
	case landlock < 1:
		return unconfinable("files are not confined: this kernel has no Landlock, or it is off")
	case a.network() && !a.AnyPort && landlock < landlockNet:
		return unconfinable("ports are not confined: this kernel's Landlock cannot (Linux 6.7 can)")
	}
	return nil
}

// phrases describes what is in force, for people: with the given version of
// Landlock (0: none), and with seccomp unless there is an error.
func (c *confinement) phrases(a Access, landlock int, seccomp error) (out []string) {
	if landlock < 1 {
		out = append(out, "files not confined: this kernel has no Landlock")
	} else {
		out = append(out, "reads only "+rootList(c.roots, false, "what the system has for every program"))
		if written := rootList(c.roots, true, ""); written != "" {
			out = append(out, "writes only "+written)
		}
	}
	switch {
	case !a.network() && seccomp == nil:
		out = append(out, "no network")
	case a.AnyPort:
		out = append(out, "connects to any port")
	case landlock < landlockNet:
		out = append(out, "ports not confined: this kernel's Landlock cannot")
	default:
		out = append(out, "connects by TCP only to "+portList(a.Ports))
	}
	if a.UnixSockets {
		out = append(out, "connects to any Unix socket")
	}
	if seccomp != nil {
		return append(out, "system calls not confined: "+seccomp.Error())
	}
	return append(out, "starts no program", "listens nowhere")
}

// rootList names the roots of a kind, then the rest.
func rootList(roots []root, write bool, rest string) string {
	var names []string
	for _, r := range roots {
		if r.write == write && !r.system {
			names = append(names, r.path)
		}
	}
	if rest != "" {
		names = append(names, rest)
	}
	return strings.Join(names, ", ")
}

// socketDirKey is go-plugin's variable for the directory of the socket.
const socketDirKey = "PLUGIN_UNIX_SOCKET_DIR"

// dnsPort is where the system's resolver asks.
const dnsPort = 53

func portList(list []uint16) string {
	var out []string
	for _, p := range slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(list), dnsPort)))) {
		out = append(out, strconv.Itoa(int(p)))
	}
	return strings.Join(out, ", ")
}
