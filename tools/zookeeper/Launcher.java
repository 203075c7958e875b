package io.isthmus.tools;

import org.apache.zookeeper.server.quorum.QuorumPeerMain;

/** Starts a ZooKeeper server with the configuration file that the property zookeeper.config names. */
public class Launcher {

    public static void main(String[] args) {
        QuorumPeerMain.main(new String[] {System.getProperty("zookeeper.config")});
    }
}
