package main

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Processes with different shards share a registry, also when they take turns
// with one state directory; what they cannot serve is said at the start.
func TestServeShards(t *testing.T) {
	dir := t.TempDir()
	config := func(xds string) string {
		path := filepath.Join(dir, "isthmus.yaml")
		text := "listen: {admin: '127.0.0.1:0', xds: [" + xds + "]}\nstate: {dir: " + dir + "/state}\n" +
			"registries: [{name: load, type: sim, config: {services: 60, instances: 1, changes_per_second: 0}}]\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	services, elsewhere := 0, 0
	for _, shards := range []string{"0-1/3", "2/3"} {
		p := start(t, "serve", "--config", config("'127.0.0.1:0'"), "--shards", shards)
		admin := p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
		n, _ := strconv.Atoi(p.find(p.stderr, `msg="listing complete" .*services=(\d+)`)[1])
		if n == 0 || n == 60 {
			t.Errorf("shard %s has %d services", shards, n)
		}
		services += n
		// A host of another process's shard is not one that nobody has.
		code, text := get(t, "http://"+admin+"/api/v1/explain?host=account-0000.load")
		if code != http.StatusOK {
			t.Errorf("explain: %d %s", code, text)
		}
		if strings.Contains(text, "it would be in shard ") && strings.Contains(text, "this process follows "+shards+" (--shards)") {
			elsewhere++
		}
		p.signal(syscall.SIGTERM)
		if code := p.wait(); code != exitOK {
			t.Errorf("ended with %d", code)
		}
		if log := strings.Join(p.stderr.seen, "\n"); strings.Contains(log, "held back") || strings.Contains(log, "restored") {
			t.Errorf("shard %s began with the state of others:\n%s", shards, log)
		}
	}
	if elsewhere != 1 {
		t.Errorf("%d of 2 processes say that another one has the host", elsewhere)
	}
	if services != 60 {
		t.Errorf("%d services together, want 60", services)
	}
	views := config("{address: '127.0.0.1:0', view: {shard: 0/4}}, {address: '127.0.0.1:0', view: {shard: 3/4}}")
	for _, tt := range []struct {
		code int
		want string
		args []string
	}{
		{exitUsage, `--shards "4/4": shard 4 is out of range: of 4 there are 0 to 3`, []string{"serve", "--config", views, "--shards", "4/4"}},
		{exitUsage, `--shards "": must be a shard`, []string{"serve", "--config", views, "--shards", ""}},
		{exitConfig, `isthmus.yaml:1:\d+: listen.xds\[1\].view.shard: selects nothing, for this process has only shard 0/2`, []string{"serve", "--config", views, "--shards", "0/2"}},
		{exitOK, `warning: the views of the listeners leave a gap: no listener has shard 1-2/4`, []string{"validate", "--config", views}},
	} {
		p := start(t, tt.args...)
		code := p.wait()
		if text := strings.Join(append(p.stdout.seen, p.stderr.seen...), "\n"); code != tt.code || !regexp.MustCompile(tt.want).MatchString(text) {
			t.Errorf("%v ended with %d and wrote %s; want %d and %s", tt.args, code, text, tt.code, tt.want)
		}
	}
}

// meshconfig says how many shards a number of instances wants, in a comment
// before the block.
func TestMeshConfigShards(t *testing.T) {
	path := filepath.Join(t.TempDir(), "isthmus.yaml")
	text := "listen: {admin: '127.0.0.1:0', xds: [{address: '127.0.0.1:15051', view: {shard: 0/2}}, {address: '127.0.0.1:15052', view: {shard: 1/2}}]}\n" +
		"registries: [{name: load, type: sim}]\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		instances string
		code      int
		want      string
	}{
		{"6250", exitOK, `^# 6250 instances want no shards.\nconfigSources:`},
		{"12500", exitOK, `^# 12500 instances want 2 shards: a listener each, .*0/2.*\nconfigSources:`},
		{"100000", exitOK, `^# 100000 instances want 16 shards: .*\n# The configuration gives istiod 2 config source\(s\) besides k8s://.\nconfigSources:`},
		{"1000000000", exitOK, ` want 64 shards`},
		{"0", exitOK, `^configSources:`},
		{"-1", exitUsage, `--instances -1: must not be below 0`},
	} {
		p := start(t, "meshconfig", "--config", path, "--instances", tt.instances)
		code := p.wait()
		if text := strings.Join(append(p.stdout.seen, p.stderr.seen...), "\n"); code != tt.code || !regexp.MustCompile(tt.want).MatchString(text) {
			t.Errorf("%s instances: ended with %d and wrote %s; want %d and %s", tt.instances, code, text, tt.code, tt.want)
		}
	}
}
